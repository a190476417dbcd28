"""`bytescale compare`: all strategies on the same batches, side by side."""

import json
from dataclasses import asdict, replace
from typing import Any

import click
import numpy as np

from bytescale.cli.machine import MEMORY_FIGURES, Machine, described_machine, memory_figures, misfit, ulysses_of
from bytescale.cli.planning import Request, attention_option, planning_options, request, wide_console
from bytescale.cost import Ulysses
from bytescale.errors import UserError, counted, nearest
from bytescale.plan.step_plan import StepPlan
from bytescale.plan.validate import validate
from bytescale.planner import STRATEGIES, make_plan
from bytescale.planner.strategies import fcp
from bytescale.report.plan_table import (
    chunk_words,
    comparison_notes,
    comparison_table,
    nothing_chunked,
    plan_figures,
)
from bytescale.simulator import SimulatedStep, main_loss, mean_shares, peak_memory, shares, simulate

_MEANS = ("step_time_s", "gap", "imbalance", "idle_share", "degree_1_share", "attention_bytes", "planning_time_s")


@click.command("compare")
@planning_options
@click.option(
    "--strategies",
    default=None,
    help=f"Names, separated by commas, of: {', '.join(STRATEGIES)}.  [default: all, chunked only with a pipeline]",
)
@attention_option
@click.option("--batches", "num_batches", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value and nothing else.")
def compare(strategies: str | None, attention: str, num_batches: int, as_json: bool, **options: Any) -> None:
    """Plan the same batches with several strategies. Speedups are over the first strategy of the list.

    Every plan is validated before it is counted. A strategy that cannot plan a batch is shown with its reason; when
    none can, the exit code is 2. best may return any other strategy's plan here, block plans included. With --attention
    ulysses plans are made for rings and timed with head exchange. fcp-32k is fcp with the 32K tokens a rank of its
    source, more memory than the others have.
    """
    names = [s.name for s in STRATEGIES.values() if not s.pipeline_only or options["pp_size"] > 1]
    if options["tokens_per_rank"] < fcp.OWN_TOKENS_PER_RANK:
        names.insert(names.index("fcp") + 1, fcp.OWN_SETTING)
    if strategies is not None:
        names = [name.strip() for name in strategies.split(",") if name.strip()]
    for name in names:
        if name not in STRATEGIES and name != fcp.OWN_SETTING:
            raise UserError(f"unknown strategy {name!r}; {nearest(name, STRATEGIES)}")
    if not names:
        raise UserError("--strategies is empty")
    asked = request(**options)
    drawn = asked.batches(num_batches)
    machine = described_machine(options)
    ulysses = ulysses_of(attention, machine, asked.tp_size)
    rows = [_row(name, asked, machine, drawn, ulysses) for name in names]
    base = next((row["step_time_s"] for row in rows if not row["error"]), None)
    for row in rows:
        if not row["error"]:
            row["speedup"] = base / row["step_time_s"] if base and row["step_time_s"] else 1.0
    if as_json:
        click.echo(json.dumps(rows))
    else:
        _print(rows, asked, machine, drawn)
    if all(row["error"] for row in rows):
        raise UserError("no strategy asked for can plan these batches")


def _print(rows: list[dict[str, Any]], asked: Request, machine: Machine, drawn: list[Any]) -> None:
    tokens, sequences = np.mean([(batch.sum(), len(batch)) for batch in drawn], axis=0)
    title = (
        f"{asked.source.name}: {counted(len(drawn), 'batch')}, {tokens:.0f} tokens and {sequences:.0f} "
        f"sequences on average, {counted(asked.ranks, 'rank')}, {asked.cost.name} ({asked.cost.provenance})"
    )
    console = wide_console()
    console.print(comparison_table(rows, title))
    planned = [row for row in rows if not row["error"]]
    for note in (*comparison_notes(rows), misfit(planned, machine.cluster.name)):
        if note is None:
            continue
        console.print(note, highlight=False, soft_wrap=True)


def _row(name: str, asked: Request, machine: Machine, drawn: list[Any], ulysses: Ulysses | None) -> dict[str, Any]:
    """Means over the batches; `error` when one of them cannot be planned."""
    figures, steps = [], []
    origins: dict[str, int] = {}
    for lengths in drawn:
        try:
            problem = asked.problem(lengths, allow_blocks=ulysses is None)
            if name == fcp.OWN_SETTING:
                plan = replace(make_plan(fcp.in_own_setting(problem), "fcp"), strategy=name, origin=name)
            else:
                plan = make_plan(problem, name)
            step = simulate(plan, asked.cost, rank_speed=asked.relative_speed, ulysses=ulysses)
        except UserError as error:
            return {"strategy": name, "error": str(error), "note": ""}
        memory = memory_figures(machine, peak_memory(plan, machine.model, machine.cost, tp_size=asked.tp_size))
        if ulysses is not None:
            plan = _timed_as(plan, step)
        figures.append(plan_figures(plan, validate(plan), asked.cost, tp_size=asked.tp_size) | memory)
        steps.append(step)
        if plan.origin != name:
            origins[plan.origin] = origins.get(plan.origin, 0) + 1
    row: dict[str, Any] = {key: float(np.mean([f[key] for f in figures])) for key in _MEANS}
    tokens = sum(f["tokens"] for f in figures)
    parts = mean_shares([shares(step) for step in steps])
    return {
        "strategy": name,
        "error": "",
        **row,
        **_fullest(figures),
        "gap_max": max(f["gap"] for f in figures),
        "tokens_per_s": tokens / sum(f["step_time_s"] for f in figures),
        "batches": len(figures),
        "simulated_step_time_s": float(np.mean([step.step_time_s for step in steps])),
        "shares": asdict(parts),
        "main_loss": main_loss(parts),
        "origins": origins,
        "note": nothing_chunked(name, figures) or _memory_note(figures, asked) or _note(figures, origins),
    }


def _timed_as(plan: StepPlan, step: SimulatedStep) -> StepPlan:
    """The plan with the times of a simulation in place of those it was planned by."""
    assert plan.predicted is not None
    rank_time_s = step.ranks.busy_s.max(axis=1)
    mean_s = float(rank_time_s.mean())
    imbalance = float(rank_time_s.max()) / mean_s if mean_s > 0 else 1.0
    times = {"step_time_s": step.makespan_s, "rank_time_s": rank_time_s, "imbalance": imbalance}
    return replace(plan, predicted=replace(plan.predicted, **times))


def _fullest(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """The memory of the batch that needs most; one that does not fit comes first."""
    worst = max(figures, key=lambda f: (f["fits"] is False, f["peak_memory_bytes"]))
    return {key: worst[key] for key in MEMORY_FIGURES}


def _memory_note(figures: list[dict[str, Any]], asked: Request) -> str:
    """How much more a rank holds than was asked for, where it does."""
    share = max(f["tokens_per_rank"] for f in figures) / asked.tokens_per_rank
    return f"{share:.3g} times the tokens a rank of the others" if share > 1 else ""


def _note(figures: list[dict[str, Any]], origins: dict[str, int]) -> str:
    """Whose plans these are, or what the most chunked one does."""
    most = max(figures, key=lambda f: f["chunked_sequences"])
    if most["chunked_sequences"]:
        return chunk_words(most)
    return ", ".join(f"{count} of {len(figures)} plans by {name}" for name, count in origins.items())
