"""A plan in figures: one dictionary for `--json`, the same as a table for people, and the explanation as lines.

The figures say where they come from: `cost` names the model and the cluster, `cost_source` whether its coefficients
were measured, fitted or preset. Idle share is 1 - (sum of rank times) / (ranks * step); the gap is step / lower bound.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from bytescale.cost.model import CostModel
from bytescale.cost.traffic import attention_bytes
from bytescale.errors import counted
from bytescale.plan.file import prediction_to_dict
from bytescale.plan.memory import in_flight_tokens
from bytescale.plan.step_plan import StepPlan
from bytescale.plan.validate import PlanReport
from bytescale.planner.explain import SequenceReason, StepReason
from bytescale.report import units

MAX_DEGREES = 12


def plan_figures(plan: StepPlan, report: PlanReport, cost: CostModel, *, tp_size: int) -> dict[str, Any]:
    """Everything the table shows and what `predicted` holds, JSON-ready."""
    assert plan.predicted is not None
    predicted = plan.predicted
    degrees, counts = np.unique(plan.sequence_degrees(), return_counts=True)
    busy_s = float(predicted.rank_time_s.sum())
    step_s = predicted.step_time_s
    chunks = plan.sequence_chunks()
    peak_bytes = report.peak_tokens * cost.activation_bytes_per_token * plan.num_layers
    return {
        **prediction_to_dict(predicted),
        "strategy": plan.strategy,
        "origin": plan.origin or plan.strategy,
        "hdp_size": plan.hdp_size,
        "pp_size": plan.pp_size,
        "tp_size": tp_size,
        "world_size": plan.hdp_size * plan.pp_size * tp_size,
        "tokens_per_rank": plan.tokens_per_rank,
        "cost": cost.name,
        "cost_source": cost.provenance,
        "sequences": plan.num_sequences,
        "tokens": plan.num_tokens,
        "longest": int(plan.lengths.max()),
        "num_micro_batches_min": int(report.num_micro_batches.min()),
        "num_micro_batches_mean": float(report.num_micro_batches.mean()),
        "num_micro_batches_max": int(report.num_micro_batches.max()),
        "idle_ranks": len(report.idle_ranks),
        "num_gangs": report.num_gangs,
        "cp_degree": {str(d): int(c) for d, c in zip(degrees, counts, strict=True)},
        "cp_degree_max": int(degrees[-1]),
        "degree_1_share": float(counts[0]) / plan.num_sequences if degrees[0] == 1 else 0.0,
        "offloaded_sequences": len(np.unique(plan.pieces.sequence[plan.pieces.offload_ratio > 0])),
        "chunked_sequences": int((chunks > 1).sum()),
        "chunks_max": int(chunks.max()),
        "in_flight_tokens": float(in_flight_tokens(plan).max()),
        "gap": step_s / predicted.lower_bound_s if predicted.lower_bound_s > 0 else 1.0,
        "idle_share": 1.0 - busy_s / (plan.hdp_size * step_s) if step_s > 0 else 0.0,
        "tokens_per_s": plan.num_tokens / step_s if step_s > 0 else 0.0,
        "attention_bytes": attention_bytes(plan, cost.kv_bytes_per_token, cost.num_layers, cost.recompute) * tp_size,
        "peak_tokens": report.peak_tokens,
        "peak_activation_bytes": peak_bytes,
    }


def plan_table(figures: dict[str, Any], step: StepReason) -> Table:
    """The figures for a person."""
    table = Table(title=f"{figures['strategy']} plan", show_header=False, title_justify="left", box=box.SIMPLE)
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(figures, step):
        table.add_row(name, value)
    return table


def _rows(f: dict[str, Any], step: StepReason) -> list[tuple[str, str]]:
    shape = f"{f['hdp_size']} hdp" + (f" x {f['pp_size']} pp" if f["pp_size"] > 1 else "")
    shape += f" x {f['tp_size']} tp = {f['world_size']}" if f["tp_size"] > 1 or f["pp_size"] > 1 else ""
    made_by = "" if f["origin"] == f["strategy"] else f" (made by {f['origin']})"
    whole = " run whole" if f["pp_size"] > 1 else ""  # chunks may end sooner: they are on several stages at a time
    longest_words = f"sequence {step.longest} ({step.longest_length} tokens){whole}"
    bound_words = longest_words if step.bound_by != "work" else "total work"
    return [
        ("strategy", f"{f['strategy']}{made_by}"),
        ("cost model", f"{f['cost']} ({f['cost_source']})"),
        ("ranks", f"{shape}, {counted(f['tokens_per_rank'], 'token')} each, {f['idle_ranks']} idle"),
        ("sequences", f"{f['sequences']} of {units.count(f['tokens'])} tokens, longest {f['longest']}"),
        (
            "micro-batches a rank",
            f"min {f['num_micro_batches_min']}, mean {f['num_micro_batches_mean']:.1f}, "
            f"max {f['num_micro_batches_max']}",
        ),
        ("cp_degree", _histogram(f["cp_degree"])),
        ("step", f"{units.duration(f['step_time_s'])}, {units.count(f['tokens_per_s'])} tokens/s"),
        ("lower bound", f"{units.duration(f['lower_bound_s'])}, set by {bound_words}"),
        ("step / lower bound", f"{f['gap']:.4f}"),
        ("imbalance, idle share", f"{f['imbalance']:.4f}, {f['idle_share']:.2%}"),
        (
            "bounded by",
            f"rank {step.busiest_rank} ({units.duration(step.busiest_s)} busy), then waiting "
            f"{units.duration(step.waiting_s)}",
        ),
        ("attention P2P", units.size(f["attention_bytes"])),
        (
            "largest micro-batch",
            f"{f['peak_tokens']:.0f} tokens held, {units.size(f['peak_activation_bytes'])} of activations",
        ),
        ("fullest GPU", memory_words(f)),
        ("offloading", counted(f["offloaded_sequences"], "sequence") if f["offloaded_sequences"] else "none"),
        *([("chunks", chunk_words(f))] if f["chunked_sequences"] else []),
        ("planned in", units.duration(f["planning_time_s"])),
    ]


def memory_words(figures: dict[str, Any]) -> str:
    """What the fullest GPU needs, of what it has where that is known, and what leaves for the host."""
    needed, has = units.size(figures["peak_memory_bytes"]), figures["gpu_memory_bytes"]
    words = f"{needed} of {units.size(has)}" if has is not None else f"{needed} by the model's sizes"
    away = figures["host_memory_bytes"]
    return words + (f", {units.size(away)} offloaded" if away else "") + ", states included"


def nothing_chunked(strategy: str, figures: Sequence[dict[str, Any]]) -> str | None:
    """One line where chunks were asked for and no plan has one."""
    if strategy != "chunked" or any(f["chunked_sequences"] for f in figures):
        return None
    why = "chunks need a pipeline (--pp-size)" if figures[0]["pp_size"] == 1 else "no chunk made a step shorter"
    return f"chunked: nothing was chunked, {why}; the plan is that of best"


def chunk_words(figures: dict[str, Any]) -> str:
    """How many sequences run in chunks and what that keeps in memory."""
    return (
        f"{figures['chunked_sequences']} of {figures['sequences']} sequences in up to {figures['chunks_max']} chunks, "
        f"at most {figures['in_flight_tokens']:.0f} tokens between forward and backward of "
        f"{figures['pp_size'] * figures['tokens_per_rank']} allowed, kept gradients counted"
    )


def _histogram(degrees: dict[str, int]) -> str:
    pairs = [(int(degree), count) for degree, count in degrees.items()]
    shown = ", ".join(f"{degree}: {count}" for degree, count in pairs[:MAX_DEGREES])
    if len(pairs) > MAX_DEGREES:
        rest = pairs[MAX_DEGREES:]
        shown += f", {rest[0][0]}-{rest[-1][0]}: {sum(count for _, count in rest)}"
    return shown


def explanation_table(reasons: Sequence[SequenceReason]) -> Table:
    """The longest sequences and why they got their degree."""
    table = Table(title="longest sequences", title_justify="left", box=box.SIMPLE)
    for name in ("sequence", "tokens", "ranks", "offload", "time"):
        table.add_column(name, justify="right")
    table.add_column("why")
    for r in reasons:
        table.add_row(
            str(r.sequence), str(r.length), str(r.degree), f"{r.offload_ratio:.2f}", units.duration(r.time_s), r.reason
        )
    return table


def explanation_lines(step: StepReason, figures: dict[str, Any]) -> list[str]:
    """What bounds the step, in sentences."""
    first = list(dict.fromkeys(step.first_sequences))  # several chunks of one sequence name it once
    lines = [
        f"rank {step.busiest_rank} bounds the step: {units.duration(step.busiest_s)} of work, most of it in "
        f"sequence{'s' if len(first) > 1 else ''} {', '.join(map(str, first))}",
        f"waiting beyond that: {units.duration(step.waiting_s)}",
    ]
    if step.bound_by == "longest sequence":
        plans, whole = ("no plan without chunks", ", run whole") if figures["pp_size"] > 1 else ("no plan", "")
        lines.append(
            f"{plans} is faster than {units.duration(figures['lower_bound_s'])}: the longest sequence "
            f"({step.longest}, {step.longest_length} tokens) takes that at any degree{whole}"
        )
    else:
        lines.append(f"no plan is faster than {units.duration(figures['lower_bound_s'])}: total work over all ranks")
    return lines


def comparison_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Strategies side by side, means over the batches; those that cannot plan are left to `comparison_notes`."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=0)
    table.add_column("strategy", no_wrap=True)
    for name in (
        *("step", "tokens/s", "speedup", "step/\nbound", "imbal-\nance", "idle"),
        *("degree\n1", "P2P", "memory", "planned\nin"),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("loses most to", no_wrap=True)
    for row in rows:
        if row["error"]:
            table.add_row(row["strategy"], *["-"] * 11)
            continue
        table.add_row(
            row["strategy"],
            units.duration(row["step_time_s"]),
            units.count(row["tokens_per_s"]),
            "no fit" if row["fits"] is False else f"{row['speedup']:.2f}x",
            f"{row['gap']:.4f}",
            f"{row['imbalance']:.3f}",
            f"{row['idle_share']:.2%}",
            f"{row['degree_1_share']:.1%}",
            units.size(row["attention_bytes"]),
            units.size(row["peak_memory_bytes"]),
            units.duration(row["planning_time_s"]),
            row["main_loss"].replace("exposed communication", "exposed comms"),
        )
    return table


def comparison_notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Why a strategy has no row, and which strategies' plans `best` returned."""
    notes = [f"{row['strategy']}: {row['error'] or row['note']}" for row in rows if row["error"] or row["note"]]
    return notes
