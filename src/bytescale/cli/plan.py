"""`bytescale plan`: place one global batch, show what the plan is worth, store it, or check a stored one."""

import json
from pathlib import Path
from typing import Any

import click

from bytescale.cli.machine import described_machine, memory_figures, misfit
from bytescale.cli.paths import UserPath
from bytescale.cli.planning import is_given, planning_options, request, wide_console
from bytescale.errors import UserError, counted
from bytescale.plan.file import read_plan, write_plan
from bytescale.plan.validate import validate
from bytescale.planner import STRATEGIES, make_plan
from bytescale.planner.explain import explain_sequences, explain_step
from bytescale.report.plan_plot import draw_plan
from bytescale.report.plan_table import (
    explanation_lines,
    explanation_table,
    nothing_chunked,
    plan_figures,
    plan_table,
)
from bytescale.simulator import peak_memory

_STRATEGY_HELP = "How to place: " + ", ".join(STRATEGIES) + "."


@click.command("plan")
@planning_options
@click.option("--strategy", default="best", show_default=True, help=_STRATEGY_HELP)
@click.option("--out", type=UserPath(), help="Write the plan file here.")
@click.option("--check", type=UserPath(), help="Validate this plan file and do nothing else.")
@click.option("--plot", type=UserPath(), help="Draw ranks by time here (.png, .svg); needs bytescale[report].")
@click.option("--allow-blocks", is_flag=True, help="Let best return a block plan, which train cannot run.")
@click.option("--explain", is_flag=True, help="Say why the longest sequences got their degree.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value and nothing else.")
def plan(
    strategy: str,
    out: Path | None,
    check: Path | None,
    plot: Path | None,
    allow_blocks: bool,
    explain: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Place one global batch on HDP ranks and show what the plan is worth.

    A lengths file without --batch-tokens or --batch-sequences is one global batch as it stands.
    """
    if check is not None:
        _check_alone()
        _check(check, as_json)
        return
    asked = request(**options)
    lengths = asked.batches(1)[0]
    step_plan = make_plan(asked.problem(lengths, allow_blocks=allow_blocks), strategy)
    report = validate(step_plan)
    machine = described_machine(options)
    figures = plan_figures(step_plan, report, asked.cost, tp_size=asked.tp_size)
    figures |= memory_figures(machine, peak_memory(step_plan, machine.model, machine.cost, tp_size=asked.tp_size))
    step = explain_step(step_plan, asked.cost)
    reasons = explain_sequences(step_plan, asked.cost) if explain else []
    if out is not None:
        _written(out, step_plan)
    if plot is not None:
        draw_plan(step_plan, asked.cost, plot)
    if as_json:
        if explain:
            figures["explain"] = [vars(reason) for reason in reasons]
            figures["bounded_by"] = vars(step)
        click.echo(json.dumps(figures))
        return
    console = wide_console()
    console.print(plan_table(figures, step))
    if explain:
        console.print(explanation_table(reasons))
        for line in explanation_lines(step, figures):
            console.print(line, highlight=False)
    for note in (misfit([figures], machine.cluster.name), nothing_chunked(strategy, [figures])):
        if note is not None:
            console.print(note, highlight=False, soft_wrap=True)
    for what, path in (("plan", out), ("picture", plot)):
        if path is not None:
            console.print(f"{what} written to {path}", highlight=False, soft_wrap=True)


def _written(path: Path, step_plan: Any) -> None:
    try:
        write_plan(step_plan, path)
    except OSError as error:
        raise UserError(f"cannot write plan {path}: {error.strerror}") from None


def _check_alone() -> None:
    """Refuse options that would have no effect beside `--check`."""
    parameters = click.get_current_context().command.params
    given = [p.opts[0] for p in parameters if p.name not in ("check", "as_json") and is_given(str(p.name))]
    if given:
        raise UserError(f"--check proves the plan file as it stands: leave out {', '.join(given)}")


def _check(path: Path, as_json: bool) -> None:
    stored = read_plan(path)
    report = validate(stored)
    value = {
        "valid": True,
        "strategy": stored.strategy,
        "sequences": stored.num_sequences,
        "tokens": stored.num_tokens,
        "hdp_size": stored.hdp_size,
        "pp_size": stored.pp_size,
        "num_gangs": report.num_gangs,
        "idle_ranks": len(report.idle_ranks),
        "peak_tokens": report.peak_tokens,
        "num_micro_batches_min": int(report.num_micro_batches.min()),
        "num_micro_batches_max": int(report.num_micro_batches.max()),
    }
    if as_json:
        click.echo(json.dumps(value))
        return
    click.echo(
        f"{path}: valid. {counted(stored.num_sequences, 'sequence')}, {counted(stored.num_tokens, 'token')} on "
        f"{counted(stored.hdp_size, 'rank')}, micro-batches {value['num_micro_batches_min']}-"
        f"{value['num_micro_batches_max']}, {counted(report.num_gangs, 'gang')}, "
        f"{counted(len(report.idle_ranks), 'idle rank')}, at most {report.peak_tokens:.0f} of "
        f"{counted(stored.tokens_per_rank, 'token')} held"
    )
