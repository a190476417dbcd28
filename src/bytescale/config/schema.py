"""The typed configuration of a training run: one frozen dataclass per TOML section, names fixed by contract.

Values are checked where they are made, so a `Config` that exists is consistent in itself; what depends on the world
size, the data or the model is checked where those are known. `bytescale.config.toml` reads TOML and command-line
overrides into these classes and writes the resolved configuration back.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from bytescale.errors import UserError

Source = Literal["text-tree", "jsonl", "parquet", "python-stdlib"]
Overlong = Literal["split", "drop", "error"]
DType = Literal["float32", "bfloat16"]
Checkpointing = Literal["none", "full"]

MAX_RATE = 1e9
"""Far above any rate that trains, and safe to multiply in float32."""

MAX_COMM_TIMEOUT_S = 30 * 24 * 3600
"""Far above any real wait, and within what the communication libraries can count."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _require_at_least(key: str, value: float | None, least: int) -> None:
    _require(value is None or value >= least, f"{key} = {value}; it must be at least {least}")


def _require_choice(key: str, value: str, choices: Any) -> None:
    known = get_args(choices)
    _require(value in known, f"{key} = {value!r} is unknown; choose one of {', '.join(known)}")


@dataclass(frozen=True)
class ModelConfig:
    """What to train: exactly one of a built-in preset, a local checkpoint directory, or a Hugging Face config table.

    Attributes:
        preset: name of a built-in configuration, see `bytescale.runtime.model.decoder`.
        path: directory with config.json and safetensors weights.
        config: a Hugging Face config as a table; `model_type` names the architecture.
    """

    preset: str | None = None
    path: str | None = None
    config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("preset", "path", "config") if getattr(self, name) is not None]
        _require(
            len(given) == 1,
            f"[model] needs exactly one of preset, path, config; given: {', '.join(given) or 'none'}",
        )


@dataclass(frozen=True)
class DataConfig:
    """Where sequences come from.

    Attributes:
        source: kind of source.
        path: directory (`text-tree`) or file or glob (`jsonl`, `parquet`); unused by `python-stdlib`.
        glob: which files of a `text-tree` are read.
        text_field: JSON key or parquet column that holds the text.
        tokenizer: `byte`, or a `tokenizer.json` file.
        end_token: token that ends every document; None finds it for `tokenizer.json` files, `byte` has its own.
        max_context: longest sequence, in tokens.
        overlong: what happens to longer ones.
        cache_dir: directory of tokenised data, shared by the ranks of a node; None is the user's cache directory.
    """

    source: Source
    path: str | None = None
    glob: str = "**/*"
    text_field: str = "text"
    tokenizer: str = "byte"
    end_token: str | None = None
    max_context: int = 8192
    overlong: Overlong = "split"
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        _require_choice("data.source", self.source, Source)
        _require_choice("data.overlong", self.overlong, Overlong)
        _require_at_least("data.max_context", self.max_context, 2)
        _require(
            self.source == "python-stdlib" or self.path is not None, f'data.source = "{self.source}" needs data.path'
        )


@dataclass(frozen=True)
class BatchConfig:
    """Size of the global batch: exactly one of tokens and sequences. Independent of the number of ranks."""

    tokens: int | None = None
    sequences: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.tokens, self.sequences) if value is not None]
        _require(len(given) == 1, "[batch] needs exactly one of tokens and sequences")
        _require(given[0] >= 1, f"[batch] must ask for at least 1, not {given[0]}")


@dataclass(frozen=True)
class ParallelConfig:
    """Device mesh. When `hdp_size` is given, pp_size * tp_size * hdp_size must equal the world size."""

    pp_size: int = 1
    tp_size: int = 1
    hdp_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("pp_size", "tp_size", "hdp_size"):
            _require_at_least(f"parallel.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class PlanConfig:
    """How each global batch is placed.

    Attributes:
        strategy: name of a planner strategy.
        tokens_per_rank: activation capacity C of a rank for one micro-batch, in tokens.
        offload: `auto`, `off`, or one ratio in [0, 1] for every piece.
        profile: file of measured cost coefficients; None uses estimates from the model's shape.
    """

    strategy: str = "best"
    tokens_per_rank: int = 8192
    offload: str | float = "auto"
    profile: str | None = None

    def __post_init__(self) -> None:
        _require_at_least("plan.tokens_per_rank", self.tokens_per_rank, 1)
        if isinstance(self.offload, str):
            _require(
                self.offload in ("auto", "off"), f"plan.offload = {self.offload!r}; it is auto, off or a number in 0..1"
            )
        else:
            _require(0 <= self.offload <= 1, f"plan.offload = {self.offload}; a ratio lies in 0..1")


@dataclass(frozen=True)
class OffloadConfig:
    """Where offloaded activations go; whether anything is offloaded says `plan.offload`.

    Attributes:
        dir: directory of the offload file on machines without CUDA; None is `run.dir`.
        limit_bytes: most bytes that one rank keeps there (with CUDA: in pinned host memory); None is half of what is
            free at the start, shared by the ranks of the machine.
        min_bytes: smaller tensors stay.
    """

    dir: str | None = None
    limit_bytes: int | None = None
    min_bytes: int = 1 << 16

    def __post_init__(self) -> None:
        _require(self.dir is None or self.dir != "", "offload.dir is empty; leave it out to use run.dir")
        _require_at_least("offload.limit_bytes", self.limit_bytes, 0)
        _require_at_least("offload.min_bytes", self.min_bytes, 1)


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation.

    Attributes:
        steps: optimizer steps to run.
        lr: peak learning rate of AdamW, reached after `warmup_steps`, then cosine decay to `min_lr_ratio * lr`.
        grad_clip: largest global gradient norm; 0 turns clipping off.
        dtype: type of compute; master weights and reductions stay float32.
        activation_checkpointing: `full` recomputes every layer in the backward.
        compute_threads: CPU threads of one rank; None divides the machine's cores by the local ranks.
    """

    steps: int = 100
    lr: float = 3e-4
    min_lr_ratio: float = 0.1
    warmup_steps: int = 0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    dtype: DType = "float32"
    activation_checkpointing: Checkpointing = "none"
    seed: int = 0
    compute_threads: int | None = None

    def __post_init__(self) -> None:
        _require_choice("train.dtype", self.dtype, DType)
        _require_choice("train.activation_checkpointing", self.activation_checkpointing, Checkpointing)
        for name in ("steps", "compute_threads"):
            _require_at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("warmup_steps", "weight_decay", "grad_clip", "seed"):
            _require_at_least(f"train.{name}", getattr(self, name), 0)
        _require(0 < self.lr <= MAX_RATE, f"train.lr = {self.lr}; it must be above 0 and at most {MAX_RATE:g}")
        _require(
            self.weight_decay <= MAX_RATE, f"train.weight_decay = {self.weight_decay}; it must be at most {MAX_RATE:g}"
        )
        _require(0 <= self.min_lr_ratio <= 1, f"train.min_lr_ratio = {self.min_lr_ratio}; it lies in 0..1")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"train.{name} = {value}; it must be at least 0 and below 1")


@dataclass(frozen=True)
class RunConfig:
    """Where a run writes, and how long a rank waits for another before it gives up.

    Attributes:
        dir: run directory.
        save_model: write the trained model as a Hugging Face checkpoint to `dir/model` at the end.
        comm_timeout_s: bound of every wait on another rank.
    """

    dir: str = "runs/default"
    save_model: bool = True
    comm_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _require(
            0 < self.comm_timeout_s <= MAX_COMM_TIMEOUT_S,
            f"run.comm_timeout_s = {self.comm_timeout_s}; it must be above 0 and at most {MAX_COMM_TIMEOUT_S}",
        )


@dataclass(frozen=True)
class Config:
    """A whole run. `model`, `data` and `batch` have no default."""

    model: ModelConfig
    data: DataConfig
    batch: BatchConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)
