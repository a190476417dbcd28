"""`bytescale simulate`: run a plan, or plan and run batches, on a described cluster; or find the longest context.

The planner plans and the simulator runs; this command joins the two. Overheads of the step (collectives, transfers
between stages) come from the model and the cluster; `--bare` leaves them out, and the step time is then the predicted
one.
"""

import json
from pathlib import Path
from typing import Any

import click

from bytescale.arrays import ceil_div
from bytescale.cli.machine import Machine, described_machine, memory_figures, misfit, ulysses_of
from bytescale.cli.paths import UserPath
from bytescale.cli.planning import Request, attention_option, is_given, planning_options, request, wide_console
from bytescale.errors import UserError, counted
from bytescale.plan.file import prediction_to_dict, read_plan
from bytescale.plan.step_plan import StepPlan
from bytescale.plan.validate import validate
from bytescale.planner import make_plan
from bytescale.report import units
from bytescale.report.simulation import context_table, draw_timeline, simulation_table
from bytescale.simulator import (
    SimulatedStep,
    StepOverheads,
    context_limits,
    peak_memory,
    simulate,
    step_figures,
    step_overheads,
    step_spans,
)
from bytescale.trace import write_trace


@click.command("simulate")
@click.argument("plan_file", required=False, type=UserPath(), metavar="[PLAN]")
@planning_options
@click.option("--strategy", default="best", show_default=True, help="How to place, where no PLAN is given.")
@attention_option
@click.option("--batches", "num_batches", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--max-length", is_flag=True, help="Say the longest context that fits, and what binds.")
@click.option("--update-ms", type=click.FloatRange(min=0), default=0.0, help="Optimizer and the rest, once a step.")
@click.option("--loading-ms", type=click.FloatRange(min=0), default=0.0, help="Reading a batch.")
@click.option("--no-prefetch", is_flag=True, help="Loading and planning do not overlap the step before.")
@click.option("--bare", is_flag=True, help="Micro-batches alone: no collectives, no transfers between stages.")
@click.option("--trace", type=UserPath(), help="Write a Chrome/Perfetto trace of --trace-ranks.")
@click.option("--trace-ranks", default="0-7", show_default=True, help="Ranks of trace and plot, such as 0-3,8.")
@click.option("--plot", type=UserPath(), help="Draw the timeline here (.png, .svg); needs bytescale[report].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value and nothing else.")
def simulate_command(
    plan_file: Path | None,
    strategy: str,
    attention: str,
    num_batches: int,
    max_length: bool,
    update_ms: float,
    loading_ms: float,
    no_prefetch: bool,
    bare: bool,
    trace: Path | None,
    trace_ranks: str,
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Simulate a step plan on a described cluster.

    PLAN is a file of `bytescale plan --out`; without it batches are drawn and planned first.
    """
    if plan_file is not None:
        _check_planned(max_length)
    if max_length:
        _longest(options, as_json)
        return
    chosen = _chosen_ranks(trace_ranks)
    if is_given("trace_ranks") and trace is None and plot is None:
        raise UserError("--trace-ranks chooses ranks of --trace and --plot: give one of them")
    machine, rank_speed = described_machine(options), None
    if plan_file is not None:
        stored = _plan_that_fits(read_plan(plan_file), machine.cost.num_layers)
        _say_if_made_for_another(stored, machine)
        plans = [stored]
    else:
        asked = request(**options)
        plans, rank_speed = _planned(asked, strategy, num_batches), asked.relative_speed
    ulysses = ulysses_of(attention, machine, options["tp_size"])
    rows, first = [], None
    for plan in plans:
        planning_s = plan.predicted.planning_time_s if plan.predicted is not None else 0.0
        extra = StepOverheads()
        if not bare:
            extra = step_overheads(
                machine.model,
                machine.cluster,
                hdp_size=plan.hdp_size,
                tp_size=options["tp_size"],
                pp_size=plan.pp_size,
                update_s=update_ms / 1e3,
                loading_s=loading_ms / 1e3,
                planning_s=planning_s,
                prefetch=not no_prefetch,
            )
        step = simulate(plan, machine.cost, extra, rank_speed=rank_speed, ulysses=ulysses)
        first = first or step
        rows.append(_figures(step, machine, options["tp_size"]))
    assert first is not None
    _files(first, chosen, trace, plot)
    if as_json:
        click.echo(json.dumps(rows[0] if len(rows) == 1 else rows))
        return
    console = wide_console()
    console.print(simulation_table(rows, f"{machine.cost.name} ({machine.cost.provenance})"))
    if (line := misfit(rows, machine.cluster.name)) is not None:
        console.print(line, highlight=False, soft_wrap=True)
    for what, path in (("trace", trace), ("timeline", plot)):
        if path is not None:
            console.print(f"{what} written to {path}", highlight=False, soft_wrap=True)


_PLANNING_ONLY = (
    *("lengths", "ranks", "pp_size", "tokens_per_rank", "batch_tokens", "batch_sequences", "context", "offload"),
    *("offload_cap", "rank_speed", "seed", "strategy", "num_batches"),
)


def _check_planned(max_length: bool) -> None:
    """Refuse what would have no effect on a plan that exists."""
    if max_length:
        raise UserError("--max-length asks for no step: leave PLAN out")
    context = click.get_current_context()
    options = {option.name: option.opts[0] for option in context.command.params}
    if given := [options[name] for name in _PLANNING_ONLY if is_given(name)]:
        verb = "says" if len(given) == 1 else "say"
        raise UserError(
            f"{', '.join(given)} {verb} how to plan, and PLAN is planned already: leave out one or the other"
        )


def _figures(step: SimulatedStep, machine: Machine, tp_size: int) -> dict[str, Any]:
    plan = step.plan
    figures = step_figures(step, machine.model, machine.cost, tp_size=tp_size, cluster=machine.peak_of)
    memory = memory_figures(machine, peak_memory(plan, machine.model, machine.cost, tp_size=tp_size))
    predicted = {} if plan.predicted is None else prediction_to_dict(plan.predicted)
    return predicted | figures | memory | ({"origin": plan.origin} if plan.origin else {})


def _planned(asked: Request, strategy: str, num_batches: int) -> list[StepPlan]:
    return [make_plan(asked.problem(lengths, allow_blocks=True), strategy) for lengths in asked.batches(num_batches)]


def _plan_that_fits(plan: StepPlan, num_layers: int) -> StepPlan:
    """A stored plan, proven valid and checked against the model's number of layers."""
    validate(plan)
    needed = ceil_div(num_layers, plan.pp_size)
    if plan.num_layers != needed:
        raise UserError(
            f"the plan has {counted(plan.num_layers, 'layer')} a rank; this model has {num_layers} on "
            f"{counted(plan.pp_size, 'stage')}, "
            f"{needed} a rank: choose the --model the plan was made for"
        )
    return plan


def _say_if_made_for_another(plan: StepPlan, machine: Machine) -> None:
    """One line where the planner predicted this plan with other costs; a plan file does not say which they were."""
    if plan.predicted is None:
        return
    now_s, then_s = simulate(plan, machine.cost, StepOverheads()).step_time_s, plan.predicted.step_time_s
    if abs(now_s - then_s) > 1e-6 * then_s:
        click.echo(
            f"bytescale: the plan was predicted to take {units.duration(then_s)} without overheads, and takes "
            f"{units.duration(now_s)} on {machine.cost.name}: it was made with another --model, --cluster, --tp-size, "
            "--profile or with --rank-speed",
            err=True,
        )


def _chosen_ranks(text: str) -> list[int]:
    """Ranks from words such as 0-3,8."""
    ranks: list[int] = []
    for word in text.split(","):
        low, dash, high = word.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or int(high or low) < int(low):
            raise UserError(f"--trace-ranks is {text!r}; it is a list such as 0-3,8")
        ranks += range(int(low), int(high or low) + 1)
    return sorted(set(ranks))


def _files(step: SimulatedStep, ranks: list[int], trace: Path | None, plot: Path | None) -> None:
    if trace is None and plot is None:
        return
    if ranks[0] >= step.plan.hdp_size:
        raise UserError(f"--trace-ranks names no rank of the plan; its ranks are 0-{step.plan.hdp_size - 1}")
    spans = step_spans(step, [rank for rank in ranks if rank < step.plan.hdp_size])
    if trace is not None:
        try:
            write_trace(spans, trace)
        except OSError as error:
            raise UserError(f"cannot write trace {trace}: {error.strerror}") from None
    if plot is not None:
        draw_timeline(spans, plot)


def _longest(options: dict[str, Any], as_json: bool) -> None:
    if options["ranks"] is None:
        raise UserError("--ranks is missing: the number of HDP ranks")
    for name in ("ranks", "pp_size", "tp_size"):
        if options[name] < 1:
            raise UserError(f"--{name.replace('_', '-')} is {options[name]}; it must be at least 1")
    machine, explicit = described_machine(options), is_given("tokens_per_rank")
    if machine.memory_bytes is None and not explicit:
        raise UserError("--max-length on a machine without GPUs needs --tokens-per-rank: its memory is not known")
    limits = context_limits(
        machine.model,
        machine.cluster,
        machine.cost,
        hdp_size=options["ranks"],
        tp_size=options["tp_size"],
        pp_size=options["pp_size"],
        tokens_per_rank=options["tokens_per_rank"] if explicit else None,
    )
    if as_json:
        click.echo(json.dumps([vars(limit) for limit in limits]))
        return
    device = "CPU" if machine.memory_bytes is None else f"{options['cluster']} GPU"
    where = f"{machine.model.name} on {counted(options['ranks'], 'rank')} of {counted(options['tp_size'], device)}"
    wide_console().print(context_table(limits, where))
