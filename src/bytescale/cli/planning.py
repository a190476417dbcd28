"""Options that the planning commands share, and what they mean: lengths, ranks, memory, cost.

`planning_options` adds them to a command, `Request` carries them checked. Numbers of tokens may end in K, M or G.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console

from bytescale.arrays import IntArray
from bytescale.cli.paths import UserPath, at_home
from bytescale.config.quantities import EXAMPLES, parse_quantity
from bytescale.cost import CostModel, dense_flops, preset_cost
from bytescale.cost.model import shared_by
from bytescale.cost.presets import cluster_spec, model_shape
from bytescale.cost.profile import Profile, beyond_range, profile_cost, read_profile
from bytescale.errors import UserError, nearest
from bytescale.lengths.source import batches, length_source
from bytescale.lengths.table import LengthSource
from bytescale.planner.problem import OFFLOAD_CAP, Offload, Problem, make_problem

COSTS = ("dense-flops",)
TABLE_WIDTH = 120
"""Terminals of this many columns show every table whole; in narrower ones the terminal folds the lines."""


class TokenCount(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """A whole number of at least 1, with a unit or without."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        count = value if isinstance(value, int) else parse_quantity(str(value), "tokens")
        if count is None or count < 1:
            self.fail(f"{value!r} is not {EXAMPLES['tokens']}, at least 1", param, ctx)
        return int(count)


@dataclass(frozen=True)
class Request:
    """The shared options, checked.

    Attributes:
        cost: the cost model of the chosen model and cluster, of `--cost` or of `--profile`.
        profile: the profile, where one was given.
        others: named as the options are.
    """

    source: LengthSource
    ranks: int
    pp_size: int
    tp_size: int
    tokens_per_rank: int
    batch_tokens: int | None
    batch_sequences: int | None
    context: int | None
    cost: CostModel
    offload: Offload
    offload_cap: float
    seed: int
    rank_speed: npt.NDArray[np.float64] | None
    profile: Profile | None = None

    @property
    def relative_speed(self) -> npt.NDArray[np.float64] | None:
        """`rank_speed` with a mean of 1, as plans are judged by it."""
        return None if self.rank_speed is None else self.rank_speed / self.rank_speed.mean()

    def batches(self, num: int) -> list[IntArray]:
        """The global batches that source, size and seed give; says so where a profile must be extrapolated for them."""
        generator = batches(self.source, num, self.seed, tokens=self.batch_tokens, sequences=self.batch_sequences)
        drawn = list(generator)
        if self.profile is not None and (beyond := beyond_range(self.profile, np.concatenate(drawn))) is not None:
            click.echo(f"bytescale: {beyond}", err=True)
        return drawn

    def problem(self, lengths: IntArray, *, allow_blocks: bool) -> Problem:
        """The question that these options ask about one batch."""
        return make_problem(
            lengths,
            hdp_size=self.ranks,
            tokens_per_rank=self.tokens_per_rank,
            cost=self.cost,
            context=self.context,
            pp_size=self.pp_size,
            offload=self.offload,
            offload_cap=self.offload_cap,
            seed=self.seed,
            rank_speed=self.rank_speed,
            allow_blocks=allow_blocks,
        )


_OPTIONS = (
    click.option("--lengths", "lengths", help="File of lengths or a named distribution.", metavar="SOURCE"),
    click.option("--ranks", type=int, help="HDP ranks; the world is ranks * pp-size * tp-size.", metavar="N"),
    click.option("--pp-size", type=int, default=1, show_default=True, help="Pipeline stages."),
    click.option("--tp-size", type=int, default=1, show_default=True, help="GPUs of a rank."),
    click.option(
        "--tokens-per-rank", type=TokenCount(), default=8192, show_default=True, help="Activation capacity C of a rank."
    ),
    click.option("--batch-tokens", type=TokenCount(), help="Global batch by tokens."),
    click.option("--batch-sequences", type=int, help="Global batch by sequences."),
    click.option("--context", type=TokenCount(), help="Longest sequence static must hold [default: the longest]."),
    click.option("--model", default="llama-7b", show_default=True, help="Model preset."),
    click.option("--cluster", default="h100", show_default=True, help="Cluster preset."),
    click.option("--recompute", is_flag=True, help="Activation checkpointing of every layer."),
    click.option(
        "--cost",
        "--profile",
        "cost_name",
        metavar="NAME|FILE",
        help="A file of `bytescale profile` in place of model and cluster, or dense-flops: s*(12h + s), h = 4096.",
    ),
    click.option("--offload", default="auto", show_default=True, help="auto, off, or one ratio in [0, 1]."),
    click.option(
        "--offload-cap",
        type=click.FloatRange(min=1),
        default=OFFLOAD_CAP,
        show_default=True,
        help="With auto, most tokens of a rank under Eq. 3 (hdp-*), times C; inf: Eq. 3 as printed.",
    ),
    click.option("--rank-speed", type=UserPath(), help="File with a relative speed for each rank."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the drawn batch and of any search."),
)


attention_option = click.option(
    "--attention",
    type=click.Choice(["ring", "ulysses"]),
    default="ring",
    show_default=True,
    help="What the ranks of a sequence exchange: keys and values, or heads as far as these divide evenly.",
)


def wide_console() -> Console:
    """A console that neither folds nor cuts tables when its output is piped or a terminal is narrow."""
    console = Console()
    return console if console.is_terminal and console.width >= TABLE_WIDTH else Console(width=160)


def is_given(name: str) -> bool:
    """Whether the option stands on the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def planning_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the shared options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def request(
    *,
    lengths: str | None,
    ranks: int | None,
    pp_size: int,
    tp_size: int,
    tokens_per_rank: int,
    batch_tokens: int | None,
    batch_sequences: int | None,
    context: int | None,
    model: str,
    cluster: str,
    recompute: bool,
    cost_name: str | None,
    offload: str,
    offload_cap: float,
    rank_speed: Path | None,
    seed: int,
) -> Request:
    """Check the shared options.

    Raises:
        UserError: one line that names the option at fault.
    """
    if lengths is None:
        raise UserError("--lengths is missing: a file of lengths or a named distribution such as github")
    if ranks is None:
        raise UserError("--ranks is missing: the number of HDP ranks")
    for name, value in (("--ranks", ranks), ("--pp-size", pp_size), ("--tp-size", tp_size)):
        if value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")
    if batch_tokens is not None and batch_sequences is not None:
        raise UserError("give --batch-tokens or --batch-sequences, not both")
    if batch_sequences is not None and batch_sequences < 1:
        raise UserError(f"--batch-sequences is {batch_sequences}; it must be at least 1")
    if seed < 0:
        raise UserError(f"--seed is {seed}; it must be at least 0")
    return Request(
        source=length_source(at_home(lengths)),
        ranks=ranks,
        pp_size=pp_size,
        tp_size=tp_size,
        tokens_per_rank=tokens_per_rank,
        batch_tokens=batch_tokens,
        batch_sequences=batch_sequences,
        context=context,
        cost=chosen_cost(model, cluster, cost_name, tp_size, recompute=recompute),
        offload=parse_offload(offload),
        offload_cap=offload_cap,
        seed=seed,
        rank_speed=None if rank_speed is None else read_rank_speed(rank_speed),
        profile=chosen_profile(cost_name),
    )


def chosen_cost(model: str, cluster: str, cost_name: str | None, tp_size: int, *, recompute: bool = False) -> CostModel:
    """The cost model of the names; `--cost` replaces the cluster, a profile the model as well."""
    if cost_name is None:
        cluster_spec(cluster)
        return preset_cost(model, cluster, tp_size=tp_size, recompute=recompute)
    if recompute:
        raise UserError(f"--recompute goes with --model and --cluster; leave it out beside --cost {cost_name}")
    if (profile := chosen_profile(cost_name)) is not None:
        return shared_by(profile_cost(profile), tp_size, profile.model)
    if cost_name not in COSTS:
        raise UserError(f"unknown --cost {cost_name!r}, and no profile of that name; {nearest(cost_name, COSTS)}")
    return dense_flops(model_shape(model).num_layers)


def chosen_profile(cost_name: str | None) -> Profile | None:
    """The profile that `--profile` names, None where it names none."""
    if cost_name is None or cost_name in COSTS:
        return None
    path = Path(at_home(cost_name))
    return read_profile(path) if path.suffix == ".json" or path.exists() else None


def parse_offload(text: str) -> Offload:
    """`auto`, `off` or a ratio."""
    if text in ("auto", "off"):
        return "auto" if text == "auto" else "off"
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise UserError(f"--offload is {text!r}; it is auto, off or a ratio in 0..1")
    return ratio


def read_rank_speed(path: Path) -> npt.NDArray[np.float64]:
    """Relative speeds, one a line or as a JSON list."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UserError(f"cannot read rank speeds {path}: {reason}") from None
    words = text.strip("[]").replace(",", " ").split()
    try:
        return np.array([float(word) for word in words])
    except ValueError:
        raise UserError(f"{path} must hold one number a rank") from None
