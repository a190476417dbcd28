"""The totals of a run: a frozen value, its JSON file, and the table printed at the end."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bytescale.errors import UserError, counted
from bytescale.files import write_text_atomically
from bytescale.report import units


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """What a run is, known when it begins.

    Attributes:
        world_size: number of ranks.
        pp_size: pipeline stages.
        host: machine of rank 0.
        device: what it computes on.
        started_at: local time, ISO 8601.
        num_parameters: of the whole model; 0 is unknown.
        seed: train.seed.
        versions: (name, version) of the interpreter and of what decides results.
    """

    world_size: int = 1
    pp_size: int = 1
    host: str = ""
    device: str = ""
    started_at: str = ""
    num_parameters: int = 0
    seed: int = 0
    versions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class RunSummary(RunIdentity):
    """What a run did, all ranks and steps together.

    Attributes:
        steps: optimizer steps.
        tokens: input tokens trained on.
        sequences: sequences trained on.
        loss_first: loss of the first step; None when no step ran.
        loss_last: loss of the last step.
        tokens_per_s: input tokens over the time of the steps.
        num_micro_batches_min: least micro-batches of a rank in a step.
        num_micro_batches_max: most of them.
        sequences_by_degree: (cp_degree, number of sequences), ascending.
        comm_bytes: bytes that attention sent between ranks, recomputation included.
        comm_bytes_static: what `static` would have sent for the same batches; None when it was not computed.
        wall_time_s: from the first step's start to the last step's end.
        num_skipped_steps: steps without a target.
        num_split_documents: documents longer than the context, cut into several sequences.
        num_dropped_sequences: sequences dropped as too long.
        num_empty_sequences: documents without a token, dropped.
        pp_bubble: share of the compute phase that ranks waited for other stages, mean over steps.
        dp_bubble: share of it between the end of a rank and that of the last one, mean over steps.
        offload_bytes_out, offload_bytes_in: activations moved away and back.
        offload_exposed_s: time that compute stood still for copies, of the slowest rank of each step.
        offload_declined_bytes: meant to leave but stayed, for want of room.
        num_unmoved_steps: steps whose plan asked for offloading and in which nothing moved.
        targets: targets trained on; these are the `tokens` of metrics.jsonl.
        status: `finished`, `stopped` by a signal, or `failed`.
        num_nonfinite_steps: steps whose update was left out because loss or gradients were not finite.
        num_failed_checkpoints: checkpoints that could not be written.
        restarts: how often the run began again, from a checkpoint or from the start.
        num_evaluations: evaluations on held-out documents.
        eval_loss_first, eval_loss_last, eval_loss_best: what the first, the last and the best of them found.
        sources: (name, sequences, tokens) that each source gave; empty for one source.
        notes: lines that were shown besides the steps.
    """

    steps: int
    tokens: int
    sequences: int
    loss_first: float | None
    loss_last: float | None
    tokens_per_s: float
    num_micro_batches_min: int
    num_micro_batches_max: int
    sequences_by_degree: tuple[tuple[int, int], ...]
    comm_bytes: int
    comm_bytes_static: int | None
    wall_time_s: float
    num_skipped_steps: int = 0
    num_split_documents: int = 0
    num_dropped_sequences: int = 0
    num_empty_sequences: int = 0
    pp_bubble: float = 0.0
    dp_bubble: float = 0.0
    offload_bytes_out: int = 0
    offload_bytes_in: int = 0
    offload_exposed_s: float = 0.0
    offload_declined_bytes: int = 0
    num_unmoved_steps: int = 0
    targets: int = 0
    status: str = "finished"
    num_nonfinite_steps: int = 0
    num_failed_checkpoints: int = 0
    restarts: int = 0
    num_evaluations: int = 0
    eval_loss_first: float | None = None
    eval_loss_last: float | None = None
    eval_loss_best: float | None = None
    sources: tuple[tuple[str, int, int], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def share_degree_1(self) -> float:
        """Share of the sequences that one rank served alone."""
        total = sum(number for _, number in self.sequences_by_degree)
        return dict(self.sequences_by_degree).get(1, 0) / total if total else 0.0


def write_summary(summary: RunSummary, path: Path) -> None:
    """Store `summary` as JSON, atomically."""
    value = dataclasses.asdict(summary) | {"versions": dict(summary.versions)}
    write_text_atomically(path, json.dumps(value, indent=1) + "\n")


def read_summary(path: Path) -> RunSummary:
    """Load what `write_summary` stored.

    Raises:
        UserError: the file cannot be read or is not a summary.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        value["sequences_by_degree"] = tuple((int(d), int(n)) for d, n in value["sequences_by_degree"])
        value["versions"] = tuple(sorted(dict(value.get("versions", {})).items()))
        value["sources"] = tuple((str(name), int(s), int(t)) for name, s, t in value.get("sources", ()))
        value["notes"] = tuple(map(str, value.get("notes", ())))
        return RunSummary(**value)
    except OSError as error:
        raise UserError(f"cannot read summary {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not the summary of a run: {error}") from None


def summary_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """The lines of the closing table, as (name, value)."""
    low, high = summary.num_micro_batches_min, summary.num_micro_batches_max
    status = "" if summary.status == "finished" else f", {summary.status}"
    rows = [
        ("steps", f"{summary.steps:,}{status}"),
        ("tokens", _tokens(summary)),
        ("loss first / last", f"{_loss(summary.loss_first)} / {_loss(summary.loss_last)}"),
        *((f"source {name}", _given(summary, *given)) for name, *given in summary.sources),
        *([("held-out loss", _evaluations(summary))] if summary.num_evaluations else []),
        ("tokens/s", f"{units.count(summary.tokens_per_s)} on {counted(summary.world_size, 'rank')}"),
        ("wall time", units.duration(summary.wall_time_s)),
        ("micro-batches per rank", f"{low} to {high}" if low != high else f"{low}"),
        ("sequences of degree 1", f"{summary.share_degree_1:.1%}"),
        ("attention traffic", units.size(summary.comm_bytes)),
    ]
    if summary.comm_bytes_static is not None:
        rows.append(("static would have sent", _static(summary)))
    if summary.pp_size > 1:
        rows += [("PP bubble", f"{summary.pp_bubble:.1%}"), ("DP bubble", f"{summary.dp_bubble:.1%}")]
    if summary.offload_bytes_out or summary.offload_declined_bytes or summary.num_unmoved_steps:
        rows.append(("offloaded", _offloaded(summary)))
    if summary.offload_declined_bytes:
        rows.append(("stayed for want of room", units.size(summary.offload_declined_bytes)))
    for name, number in (
        ("steps skipped, no target", summary.num_skipped_steps),
        ("steps that offloaded nothing", summary.num_unmoved_steps),
        ("steps left out, not finite", summary.num_nonfinite_steps),
        ("documents split, too long", summary.num_split_documents),
        ("sequences dropped, too long", summary.num_dropped_sequences),
        ("documents dropped, empty", summary.num_empty_sequences),
    ):
        if number:
            rows.append((name, f"{number:,}"))
    return rows


def summary_table(summary: RunSummary) -> Table:
    """The closing table for a terminal."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in summary_rows(summary):
        table.add_row(name, value)
    return table


def _tokens(summary: RunSummary) -> str:
    targets = f", {summary.targets:,} of them targets" if summary.targets else ""
    return f"{summary.tokens:,} in {counted(summary.sequences, 'sequence')}{targets}"


def _given(summary: RunSummary, sequences: int, tokens: int) -> str:
    share = f" ({tokens / summary.tokens:.1%})" if summary.tokens else ""
    return f"{counted(tokens, 'token', ',')}{share} in {counted(sequences, 'sequence', ',')}"


def _loss(value: Any) -> str:
    return "none" if value is None else f"{value:.4f}"


def _evaluations(summary: RunSummary) -> str:
    first, last, best = summary.eval_loss_first, summary.eval_loss_last, summary.eval_loss_best
    if summary.num_evaluations == 1:
        return _loss(last)
    return f"{_loss(first)} / {_loss(last)}, best {_loss(best)} of {summary.num_evaluations:,}"


def _offloaded(summary: RunSummary) -> str:
    out, back = units.size(summary.offload_bytes_out), units.size(summary.offload_bytes_in)
    return f"{out} out, {back} in, {units.duration(summary.offload_exposed_s)} exposed"


def _static(summary: RunSummary) -> str:
    assert summary.comm_bytes_static is not None
    text = units.size(summary.comm_bytes_static)
    if summary.comm_bytes_static == summary.comm_bytes:
        return f"{text}, the same"
    if summary.comm_bytes and summary.comm_bytes_static:
        text += f", {units.significant(summary.comm_bytes_static / summary.comm_bytes)} times as much"
    return text
