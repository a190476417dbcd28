"""The typed configuration of a training run: one frozen dataclass per TOML section, names fixed by contract.

Values are checked where they are made, so a `Config` that exists is consistent in itself; what depends on the world
size, the data or the model is checked where those are known. `bytescale.config.toml` reads TOML and command-line
overrides into these classes and writes the resolved configuration back.

The line under a field says what it means; docs/configuration.md shows the same words. Metadata of a field says how its
text is read: `path` is a place in the file system, `unit` a size or a time that may be written with a unit.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from bytescale.config.data import DataConfig, Source
from bytescale.config.fields import path_field, require, require_at_least, require_choice, unit_field
from bytescale.config.run import CheckpointConfig, RunConfig

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16"]
Checkpointing = Literal["none", "full"]
OnNonfinite = Literal["stop", "skip"]

MAX_RATE = 1e9
"""Far above any rate that trains, and safe to multiply in float32."""


@dataclass(frozen=True)
class ModelConfig:
    """What to train: exactly one of a built-in preset, a local checkpoint directory, or a Hugging Face config table."""

    preset: str | None = None
    """a built-in configuration with fresh weights: `llama-tiny`, `llama-125m`, `llama-1b`; with a tokenizer file it
    takes the vocabulary of that"""

    path: str | None = path_field()
    """a local checkpoint directory: `config.json` and safetensors"""

    config: dict[str, Any] | None = None
    """a Hugging Face config as a table, fresh weights; `model_type` names the architecture. Without
    `max_position_embeddings` it gets `data.max_context`; a smaller stated value is refused. TOML has no null: write the
    string `"null"`"""

    def __post_init__(self) -> None:
        given = [name for name in ("preset", "path", "config") if getattr(self, name) is not None]
        require(
            len(given) == 1,
            f"[model] needs exactly one of preset, path, config; given: {', '.join(given) or 'none'}",
        )


@dataclass(frozen=True)
class BatchConfig:
    """Size of the global batch: exactly one of tokens and sequences. Independent of the number of ranks."""

    tokens: int | None = unit_field("tokens")
    """tokens of the global batch"""

    sequences: int | None = None
    """sequences of the global batch"""

    def __post_init__(self) -> None:
        given = [value for value in (self.tokens, self.sequences) if value is not None]
        require(len(given) == 1, "[batch] needs exactly one of tokens and sequences")
        require(given[0] >= 1, f"[batch] must ask for at least 1, not {given[0]}")


@dataclass(frozen=True)
class ParallelConfig:
    """Device mesh. When `hdp_size` is given, pp_size * tp_size * hdp_size must equal the world size."""

    pp_size: int = 1
    """pipeline stages; world rank = (stage * hdp_size + hdp_rank) * tp_size + tp_rank"""

    tp_size: int = 1
    """ranks that share every layer of an HDP rank: heads, hidden units, whole experts, vocabulary; must divide them"""

    expert_parallel: Literal["tp"] = "tp"
    """where the experts of a layer are: `tp`, whole ones, an equal share on each TP rank of an HDP rank"""

    hdp_size: int | None = None
    """ranks of the HDP axis; when given, pp_size * tp_size * hdp_size must equal the world"""

    shard_size: int | None = None
    """ranks that hold one copy of the model's states between them, neighbours of one stage; must divide hdp_size, which
    is the default"""

    def __post_init__(self) -> None:
        for name in ("pp_size", "tp_size", "hdp_size", "shard_size"):
            require_at_least(f"parallel.{name}", getattr(self, name), 1)

    def check_world_size(self, world_size: int) -> None:
        """Whether `world_size` ranks make this mesh.

        Raises:
            UserError: they do not; says how many would.
        """
        pp, tp, hdp = self.pp_size, self.tp_size, self.hdp_size
        ranks = f"{world_size} rank{'s' * (world_size != 1)}"
        needed = pp * tp * (hdp or 1)
        require(
            hdp is None or needed == world_size,
            f"pp_size * tp_size * hdp_size = {pp} * {tp} * {hdp} = {needed}, but the world has {ranks}: start {needed} "
            f"(--nproc {needed}) or change [parallel]",
        )
        require(
            world_size % (pp * tp) == 0,
            f"a world of {ranks} cannot be cut into pp_size * tp_size = {pp} * {tp}: start a multiple of {pp * tp}",
        )
        hdp = world_size // (pp * tp)
        shard = self.shard_size or hdp
        below = max(size for size in range(1, min(shard, hdp) + 1) if hdp % size == 0)
        require(
            hdp % shard == 0,
            f"parallel.shard_size = {shard} does not divide hdp_size = {hdp}; the next smaller that does is {below}",
        )


@dataclass(frozen=True)
class PlanConfig:
    """How each global batch is placed."""

    strategy: str = "best"
    """how sequences are placed"""

    tokens_per_rank: int = unit_field("tokens", 8192)
    """activation capacity of a rank for one micro-batch, in tokens"""

    offload: str | float = "auto"
    """`auto`: chosen per sequence by the strategy; `off`; or a ratio in 0..1 for every piece. Without a
    profile `auto` is `off` on CUDA, and on a CPU offloads only what the ranks cannot hold otherwise"""

    offload_cap: float = 1.5
    """with `auto`, most tokens of a rank where a strategy follows Eq. 3 of the paper (`hdp-naive`, `hdp-balance`), as a
    multiple of `plan.tokens_per_rank`; a number above the layers of a rank never binds: Eq. 3 as printed"""

    profile: str | None = path_field()
    """file that `bytescale profile` made of this model on this machine; without one costs are estimated from the
    model's shape"""

    def __post_init__(self) -> None:
        require_at_least("plan.tokens_per_rank", self.tokens_per_rank, 1)
        if isinstance(self.offload, str):
            require(
                self.offload in ("auto", "off"), f"plan.offload = {self.offload!r}; it is auto, off or a number in 0..1"
            )
        else:
            require(0 <= self.offload <= 1, f"plan.offload = {self.offload}; a ratio lies in 0..1")
        require_at_least("plan.offload_cap", self.offload_cap, 1)


@dataclass(frozen=True)
class OffloadConfig:
    """Where offloaded activations go; whether anything is offloaded says `plan.offload`."""

    dir: str | None = path_field()
    """directory of the offload file, on machines without CUDA; a local disk, never a memory file system"""

    limit_bytes: int | None = unit_field("bytes")
    """most bytes of one rank there (with CUDA: in pinned host memory); 0 offloads nothing. By default shared by the
    ranks of the machine"""

    min_bytes: int = unit_field("bytes", 1 << 16)
    """smaller tensors stay"""

    def __post_init__(self) -> None:
        require(self.dir is None or self.dir != "", "offload.dir is empty; leave it out to use run.dir")
        require_at_least("offload.limit_bytes", self.limit_bytes, 0)
        require_at_least("offload.min_bytes", self.min_bytes, 1)


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation."""

    steps: int = 100
    """optimizer steps"""

    lr: float = 3e-4
    """peak learning rate of AdamW"""

    min_lr_ratio: float = 0.1
    """end of the cosine decay, as a share of the peak"""

    warmup_steps: int = 0
    """linear warm-up"""

    weight_decay: float = 0.1
    """of matrices; norms and biases do not decay"""

    beta1: float = 0.9
    """AdamW, first moment"""

    beta2: float = 0.95
    """AdamW, second moment"""

    grad_clip: float = 1.0
    """largest global gradient norm; 0 turns clipping off"""

    device: Device = "auto"
    """`auto`: CUDA where every local rank has a GPU of its own, else the CPU; `cpu`; `cuda`, refused with fewer GPUs
    than local ranks"""

    dtype: DType = "auto"
    """type of compute and of the saved model: `auto` is bfloat16 on CUDA and float32 on a CPU; `bfloat16`; `float32`,
    on a CPU only; master weights and reductions stay float32"""

    activation_checkpointing: Checkpointing = "none"
    """`full` recomputes every layer in the backward"""

    seed: int = 0
    """of weights and batches"""

    compute_threads: int | None = None
    """CPU threads of a rank"""

    on_nonfinite: OnNonfinite = "stop"
    """What a loss or gradient norm that is not finite does: `stop` ends the run with the weights before that step,
    `skip` leaves the update of the step out and counts it."""

    max_skipped_steps: int = 10
    """with `on_nonfinite = "skip"`: steps in a row whose update may be left out; one more ends the run"""

    def __post_init__(self) -> None:
        require_choice("train.device", self.device, Device)
        require_choice("train.dtype", self.dtype, DType)
        require_choice("train.activation_checkpointing", self.activation_checkpointing, Checkpointing)
        require_choice("train.on_nonfinite", self.on_nonfinite, OnNonfinite)
        for name in ("steps", "compute_threads"):
            require_at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("warmup_steps", "weight_decay", "grad_clip", "seed", "max_skipped_steps"):
            require_at_least(f"train.{name}", getattr(self, name), 0)
        require(0 < self.lr <= MAX_RATE, f"train.lr = {self.lr}; it must be above 0 and at most {MAX_RATE:g}")
        require(
            self.weight_decay <= MAX_RATE, f"train.weight_decay = {self.weight_decay}; it must be at most {MAX_RATE:g}"
        )
        require(0 <= self.min_lr_ratio <= 1, f"train.min_lr_ratio = {self.min_lr_ratio}; it lies in 0..1")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"train.{name} = {value}; it must be at least 0 and below 1")


@dataclass(frozen=True)
class EvalConfig:
    """The loss on documents that are not trained on: those of `path`, else those that `data.validation` holds out."""

    every: int = 0
    """steps between evaluations; one follows the last step in any case, 0 is that one alone"""

    source: Source | None = None
    """kind of the held-out documents' source, as `data.source`, which it is by default"""

    path: str | None = path_field(glob=True)
    """held-out documents: directory, file or glob; read, tokenised and cut as `[data]` says; without it those of
    `data.validation`"""

    tokens: int | None = unit_field("tokens")
    """most tokens of an evaluation, the same sequences every time; without this or `sequences` all are taken"""

    sequences: int | None = None
    """most sequences of an evaluation"""

    def __post_init__(self) -> None:
        require_at_least("eval.every", self.every, 0)
        if self.source is not None:
            require_choice("eval.source", self.source, Source)
            require(
                self.source == "python-stdlib" or self.path is not None,
                f'eval.source = "{self.source}" needs eval.path',
            )
        for name in ("tokens", "sequences"):
            require_at_least(f"eval.{name}", getattr(self, name), 1)
        require(self.tokens is None or self.sequences is None, "[eval] takes tokens or sequences, not both")


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
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)
