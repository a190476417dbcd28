"""Everything that is known before ranks exist: model configuration, data, planner; and every check on them.

The same function serves the launching process, which only wants to fail early with one clear line, and each rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bytescale.arrays import IntArray, ceil_div
from bytescale.config.data import BYTE_TOKENIZER
from bytescale.config.schema import Config
from bytescale.config.tokenizer import check_tokenizer
from bytescale.cost import CostModel, ModelShape, attention_bytes, cluster_spec, cost_model
from bytescale.cost.model import shared_by
from bytescale.cost.predict import stage_layers
from bytescale.cost.profile import Profile, beyond_range, check_profile, profile_cost, read_profile
from bytescale.data import (
    SequenceDataset,
    Tokenizer,
    check_vocab,
    load_tokenizer,
    open_dataset,
    repetition_notes,
    steps_until_end,
)
from bytescale.errors import UserError, counted
from bytescale.plan.memory import capacity_tokens
from bytescale.plan.step_plan import StepPlan
from bytescale.planner import make_plan, make_problem
from bytescale.runtime.attention.kernels import check_kernel
from bytescale.runtime.device import TORCH_DTYPES, Machine, device_note, resolve
from bytescale.runtime.model.hf_config import load_model_config, shape_of_config
from bytescale.runtime.model.stages import layer_ranges
from bytescale.runtime.tensor_parallel.plan import check_sizes
from bytescale.train.checks import check_first
from bytescale.train.evaluation.held_out import HeldOut, open_held_out
from bytescale.train.offload import check_offloading
from bytescale.train.opening import opening_lines
from bytescale.train.optimizer import learning_rate

Planner = Callable[[IntArray], StepPlan]


MAX_BATCH_SEQUENCES = 10_000_000
"""Sequences of one global batch; far above any real one."""


@dataclass(frozen=True)
class Prepared:
    """A run, checked.

    Attributes:
        config: the run, with device and type decided.
        model_config: Hugging Face configuration.
        tokenizer: made the tokens.
        dataset: the sequences.
        shape: sizes for cost and traffic.
        stages: layers of each pipeline stage.
        planner: makes the plan of a global batch from its lengths.
        static_planner: the same with one degree for all, to compare with.
        held_out: what evaluations measure; None where there are none.
        opening: what was decided, as lines.
        notes: what deserves attention, as lines.
    """

    config: Config
    model_config: Any
    tokenizer: Tokenizer
    dataset: SequenceDataset
    shape: ModelShape
    stages: list[range]
    planner: Planner
    static_planner: Planner
    held_out: HeldOut | None = None
    opening: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """Everything to show before the first step."""
        held_out = () if self.held_out is None else (self.held_out.describe(self.config.eval.every),)
        return (*self.opening, *self.dataset.describe(), *held_out, *self.notes)


def prepare(config: Config, world_size: int, machine: Machine | None = None) -> Prepared:
    """Read and check everything but the ranks themselves.

    Args:
        config: the run.
        world_size: number of its ranks.
        machine: where they run; None looks at this one.

    Raises:
        UserError: anything in configuration, model or data that cannot work; one line.
    """
    check_first(config, world_size)
    machine = machine or Machine.here(world_size)
    note = device_note(config, machine)
    config = resolve(config, machine)
    model_config, tokenizer = model_and_tokenizer(config, config.data.max_context)
    dataset = open_dataset(config.data, tokenizer)
    if dataset.reader.num_ids > model_config.vocab_size:
        raise UserError(
            f"the data holds token {dataset.reader.num_ids - 1}, the model has vocab_size {model_config.vocab_size}; "
            "take the tokenizer that made the data, or a model with its vocabulary"
        )
    config, ends = _until_the_data_ends(config, dataset)
    held_out = open_held_out(config, tokenizer)
    shape = shape_of_config(model_config, 4 if config.train.dtype == "float32" else 2)
    check_kernel(config.train.device, TORCH_DTYPES[config.train.dtype], shape.head_dim)
    pp_size, tp_size = config.parallel.pp_size, config.parallel.tp_size
    check_sizes(model_config, tp_size)
    _check_one_machine(tp_size, machine)
    if pp_size > shape.num_layers:
        raise UserError(f"parallel.pp_size = {pp_size} needs as many layers, the model has {shape.num_layers}")
    stages = layer_ranges(stage_layers(run_cost(config, shape), pp_size).tolist())
    hdp_size = world_size // (pp_size * tp_size)
    prepared = Prepared(
        config,
        model_config,
        tokenizer,
        dataset,
        shape,
        stages,
        make_planner(config, shape, hdp_size, config.plan.strategy),
        make_planner(config, shape, hdp_size, "static"),
        held_out,
        opening_lines(config, model_config, tokenizer, world_size),
        (*([note] if note else []), *ends, *_notes(config, shape, dataset)),
    )
    _check_batch(config, dataset)
    num_layers = ceil_div(shape.num_layers, pp_size)
    _check_fits(config, dataset, num_layers, hdp_size)
    if held_out is not None:
        _check_fits(config, held_out.dataset, num_layers, hdp_size, "held-out sequence")
    # Finds what only the strategy knows, such as a context that no divisor of the ranks holds.
    _check_layout(prepared.planner(dataset.lengths[[int(dataset.lengths.argmax())]]))
    check_offloading(config)
    return prepared


def model_and_tokenizer(config: Config, max_context: int) -> tuple[Any, Tokenizer]:
    """The Hugging Face configuration and the tokenizer that belongs to it.

    Raises:
        UserError: one of them cannot be used, or they do not belong together.
    """
    check_tokenizer(config)
    tokenizer = load_tokenizer(config.data)
    # Any vocabulary holds the bytes; a preset takes that of a file.
    vocab_size = None if config.data.tokenizer in (None, BYTE_TOKENIZER) else tokenizer.vocab_size
    model_config = load_model_config(config.model, max_context, tokenizer.end_id, vocab_size, tokenizer.begin_id)
    check_vocab(tokenizer, model_config.vocab_size)
    return model_config, tokenizer


def _until_the_data_ends(config: Config, dataset: SequenceDataset) -> tuple[Config, tuple[str, ...]]:
    """`config` with no more steps than the data has, and a line where that changes it."""
    steps = steps_until_end(dataset, config.batch, config.train.seed, config.train.steps)
    if steps == config.train.steps:
        return config, ()
    line = f"the data ends after {counted(steps, 'step', ',')}: every source has gone through its epochs then"
    return replace(config, train=replace(config.train, steps=steps)), (line,)


def make_planner(config: Config, shape: ModelShape, hdp_size: int, strategy: str) -> Planner:
    """The planner of this run: a pure function of the lengths, equal on all ranks."""
    cost = run_cost(config, shape)
    # Without measured copies a CPU offloads only what must be, see `bytescale.train.offload`.
    only_if_needed = config.plan.offload == "auto" and config.plan.profile is None and config.train.device == "cpu"

    def planner(lengths: IntArray) -> StepPlan:
        fits = int(lengths.max()) <= hdp_size * config.plan.tokens_per_rank
        offload: Any = "off" if only_if_needed and fits else config.plan.offload
        problem = make_problem(
            lengths,
            hdp_size=hdp_size,
            tokens_per_rank=config.plan.tokens_per_rank,
            cost=cost,
            pp_size=config.parallel.pp_size,
            offload=offload,
            offload_cap=config.plan.offload_cap,
            context=config.data.max_context if strategy == "static" else None,
            seed=config.train.seed,
        )
        return make_plan(problem, strategy)

    return planner


def _notes(config: Config, shape: ModelShape, dataset: SequenceDataset) -> tuple[str, ...]:
    notes = [*dataset.notes, *repetition_notes(dataset, config.batch, config.train.steps)]
    train = config.train
    if train.warmup_steps > train.steps > 0:
        notes.append(
            f"train.warmup_steps = {train.warmup_steps:,} is longer than the run of {counted(train.steps, 'step')}: "
            f"the rate ends at {learning_rate(train.steps, train):.3g}, and train.lr = {train.lr:g} is never reached"
        )
    beyond = None if config.plan.profile is None else beyond_range(_profile(config, shape), dataset.lengths)
    return tuple(notes) if beyond is None else (*notes, beyond)


def run_cost(config: Config, shape: ModelShape) -> CostModel:
    """What plans of this run are judged by: the profile where there is one, else estimates from the model's shape.

    Raises:
        UserError: the profile cannot be read, or is of another model or device.
    """
    recompute = config.train.activation_checkpointing == "full"
    if config.plan.profile is None:
        h100 = cluster_spec("h100")
        # A stand-in for whatever runs here, whose machines hold whole TP groups.
        tp_size = config.parallel.tp_size
        cluster = replace(h100, gpus_per_node=tp_size * max(1, h100.gpus_per_node // tp_size))
        return cost_model(shape, cluster, tp_size=tp_size, recompute=recompute)
    profile = _profile(config, shape)
    alone = profile_cost(profile, num_layers=shape.num_layers, recompute=recompute)
    return shared_by(alone, config.parallel.tp_size, shape)


def _profile(config: Config, shape: ModelShape) -> Profile:
    path = Path(str(config.plan.profile))
    profile = read_profile(path)
    check_profile(profile, shape, config.train.device, path)
    return profile


def static_bytes(prepared: Prepared, lengths: IntArray, *, checkpointing: bool) -> int | None:
    """Bytes that `static` would have sent for a batch; None where it cannot hold the context."""
    try:
        static = prepared.static_planner(lengths)
    except UserError:
        return None
    shape = prepared.shape
    return attention_bytes(static, shape.kv_bytes_per_token, shape.num_layers, checkpointing)


def _check_one_machine(tp_size: int, machine: Machine) -> None:
    """TP ranks exchange in every layer, so they must be neighbours on one machine."""
    if machine.num_ranks % tp_size:
        fitting = [size for size in range(1, tp_size) if machine.num_ranks % size == 0]
        raise UserError(
            f"parallel.tp_size = {tp_size} does not divide the {counted(machine.num_ranks, 'rank')} of this machine, "
            f"and TP ranks must be on one; the next smaller that does is {fitting[-1]}"
        )


def _check_batch(config: Config, dataset: SequenceDataset) -> None:
    """A batch is drawn and planned in memory; one of billions is a typo, not a batch."""
    size = config.batch.sequences
    if size is None:
        size = int((config.batch.tokens or 0) / float(dataset.lengths.mean()))
    if size > MAX_BATCH_SEQUENCES:
        key, value = ("tokens", config.batch.tokens) if config.batch.tokens is not None else ("sequences", size)
        raise UserError(
            f"batch.{key} = {value} makes a global batch of about {size:,} of this data's {len(dataset):,} sequences; "
            f"at most {MAX_BATCH_SEQUENCES:,} can be planned at once"
        )


def _check_layout(plan: StepPlan) -> None:
    if plan.layout == "blocks":
        raise UserError(
            f'strategy {plan.strategy} places sequences in the "{plan.layout}" layout, which can be planned but not '
            "trained; choose another strategy"
        )


def _check_fits(
    config: Config, dataset: SequenceDataset, num_layers: int, hdp_size: int, what: str = "sequence"
) -> None:
    longest = int(dataset.lengths.argmax())
    length, ratio = int(dataset.lengths[longest]), config.plan.offload
    if isinstance(ratio, str):
        ratio = 1.0 if ratio == "auto" and config.plan.strategy != "static" else 0.0
    capacity = capacity_tokens(config.plan.tokens_per_rank, ratio, num_layers)
    needed = ceil_div(length, capacity)
    if needed <= hdp_size:
        return
    per_hdp_rank = config.parallel.pp_size * config.parallel.tp_size
    unit = "rank" if per_hdp_rank == 1 else "HDP rank" if config.parallel.pp_size == 1 else "pipeline"
    ways = [
        f"start {counted(needed * per_hdp_rank, 'rank')}",
        f"raise tokens_per_rank to {ceil_div(length * config.plan.tokens_per_rank, hdp_size * capacity)}",
    ]
    if length <= hdp_size * capacity_tokens(config.plan.tokens_per_rank, 1.0, num_layers):
        ways.append("set plan.offload = 1.0")
    raise UserError(
        f"{what} {longest} has {counted(length, 'token')} and needs {counted(needed, unit)} of "
        f"{_in_words(config, capacity)}, but there {'is' if hdp_size == 1 else 'are'} {hdp_size}: {', or '.join(ways)}"
    )


def _in_words(config: Config, capacity: int) -> str:
    setting = f"plan.tokens_per_rank = {config.plan.tokens_per_rank}"
    return setting if capacity == config.plan.tokens_per_rank else f"{capacity} tokens ({setting}, offloading)"
