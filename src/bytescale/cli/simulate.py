"""`bytescale simulate`: run a plan, or plan and run batches, on a described cluster; or find the longest context.

The planner plans and the simulator runs; this command joins the two. Overheads of the step (collectives, transfers
between stages) come from the model and the cluster; `--bare` leaves them out, and the step time is then the predicted
one.
"""

import json
from pathlib import Path
from typing import Any

import click

from bytescale.cli.planning import Request, chosen_cost, planning_options, request, wide_console
from bytescale.cost.presets import cluster_spec, model_shape
from bytescale.errors import UserError
from bytescale.plan import StepPlan
from bytescale.planfile import prediction_to_dict, read_plan
from bytescale.planner import plan_with_origin
from bytescale.report.simulation import context_table, draw_timeline, simulation_table
from bytescale.simulator import (
    SimulatedStep,
    StepOverheads,
    context_limits,
    simulate,
    step_figures,
    step_overheads,
    step_spans,
)
from bytescale.trace import write_trace
from bytescale.validate import validate


@click.command("simulate")
@click.argument("plan_file", required=False, type=click.Path(path_type=Path), metavar="[PLAN]")
@planning_options
@click.option("--strategy", default="best", show_default=True, help="How to place, where no PLAN is given.")
@click.option("--batches", "num_batches", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--max-length", is_flag=True, help="Say the longest context that fits, and what binds.")
@click.option("--update-ms", type=click.FloatRange(min=0), default=0.0, help="Optimizer and the rest, once a step.")
@click.option("--loading-ms", type=click.FloatRange(min=0), default=0.0, help="Reading a batch.")
@click.option("--no-prefetch", is_flag=True, help="Loading and planning do not overlap the step before.")
@click.option("--bare", is_flag=True, help="Micro-batches alone: no collectives, no transfers between stages.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a Chrome/Perfetto trace of --trace-ranks.")
@click.option("--trace-ranks", default="0-7", show_default=True, help="Ranks of trace and plot, such as 0-3,8.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the timeline here (.png, .svg).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value and nothing else.")
def simulate_command(
    plan_file: Path | None,
    strategy: str,
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
    if max_length:
        _longest(options, as_json)
        return
    chosen = _chosen_ranks(trace_ranks)
    tp_size, model = options["tp_size"], model_shape(options["model"])
    if plan_file is not None:
        cost = chosen_cost(options["model"], options["cluster"], options["cost_name"], tp_size)
        plans = [(_plan_that_fits(read_plan(plan_file), cost.num_layers, options["ranks"]), "")]
    else:
        asked = request(**options)
        cost, plans = asked.cost, _planned(asked, strategy, num_batches)
    rows, first = [], None
    for plan, origin in plans:
        planning_s = plan.predicted.planning_time_s if plan.predicted is not None else 0.0
        extra = StepOverheads()
        if not bare:
            extra = step_overheads(
                model,
                cluster_spec(options["cluster"]),
                hdp_size=plan.hdp_size,
                tp_size=tp_size,
                pp_size=plan.pp_size,
                update_s=update_ms / 1e3,
                loading_s=loading_ms / 1e3,
                planning_s=planning_s,
                prefetch=not no_prefetch,
            )
        step = simulate(plan, cost, extra)
        first = first or step
        rows.append(_figures(step, options, origin))
    assert first is not None
    _files(first, chosen, trace, plot)
    if as_json:
        click.echo(json.dumps(rows[0] if len(rows) == 1 else rows))
        return
    console = wide_console()
    console.print(simulation_table(rows, f"{cost.name} ({cost.provenance})"))
    for what, path in (("trace", trace), ("timeline", plot)):
        if path is not None:
            console.print(f"{what} written to {path}", highlight=False, soft_wrap=True)


def _figures(step: SimulatedStep, options: dict[str, Any], origin: str) -> dict[str, Any]:
    plan = step.plan
    model = model_shape(options["model"])
    cost = chosen_cost(options["model"], options["cluster"], options["cost_name"], options["tp_size"])
    figures = step_figures(step, model, cost, tp_size=options["tp_size"], cluster=options["cluster"])
    predicted = {} if plan.predicted is None else prediction_to_dict(plan.predicted)
    return predicted | figures | ({"origin": origin} if origin else {})


def _planned(asked: Request, strategy: str, num_batches: int) -> list[tuple[StepPlan, str]]:
    return [
        plan_with_origin(lengths, strategy, **asked.arguments(allow_blocks=True))
        for lengths in asked.batches(num_batches)
    ]


def _plan_that_fits(plan: StepPlan, num_layers: int, ranks: int | None) -> StepPlan:
    """A stored plan, proven, and of the cluster's and the model's size."""
    validate(plan)
    if ranks is not None and ranks != plan.hdp_size:
        raise UserError(f"the plan is for {plan.hdp_size} ranks, --ranks is {ranks}: make a plan for {ranks}")
    needed = -(-num_layers // plan.pp_size)
    if plan.num_layers != needed:
        raise UserError(
            f"the plan has {plan.num_layers} layers a rank; this model has {num_layers} on {plan.pp_size} stages, "
            f"{needed} a rank: choose the --model the plan was made for"
        )
    return plan


def _chosen_ranks(text: str) -> list[int]:
    """Ranks from words such as 0-3,8."""
    ranks: list[int] = []
    for word in text.split(","):
        low, dash, high = word.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise UserError(f"--trace-ranks is {text!r}; it is a list such as 0-3,8")
        ranks += range(int(low), int(high or low) + 1)
    return sorted(set(ranks))


def _files(step: SimulatedStep, ranks: list[int], trace: Path | None, plot: Path | None) -> None:
    if trace is None and plot is None:
        return
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
    given = click.get_current_context().get_parameter_source("tokens_per_rank")
    explicit = given is not None and given.name == "COMMANDLINE"
    limits = context_limits(
        model_shape(options["model"]),
        cluster_spec(options["cluster"]),
        chosen_cost(options["model"], options["cluster"], None, options["tp_size"]),
        hdp_size=options["ranks"],
        tp_size=options["tp_size"],
        pp_size=options["pp_size"],
        tokens_per_rank=options["tokens_per_rank"] if explicit else None,
    )
    if as_json:
        click.echo(json.dumps([vars(limit) for limit in limits]))
        return
    where = f"{options['model']} on {options['ranks']} ranks of {options['tp_size']} {options['cluster']} GPUs"
    wide_console().print(context_table(limits, where))
