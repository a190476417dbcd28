"""Finds the checkpoint to go on from, proves it, and brings model and optimizer to where it was; a collective.

Rank 0 says which checkpoints there are, every rank proves a share of a checkpoint's files, and all of them agree on the
first sound one: with `auto` a damaged one is named and the one before it is used, one that was asked for is refused.
Then each rank reads the boxes that it holds, whatever the layout that wrote them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bytescale.checkpoint.slices import make_optimizer_state, model_slices, optimizer_slices
from bytescale.checkpoint.stored import StoredCheckpoint, read_checkpoint
from bytescale.config.schema import Config
from bytescale.data import LoaderState
from bytescale.errors import UserError
from bytescale.files import shown
from bytescale.locks import restart_count
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.p2p import collective
from bytescale.runtime.world import World
from bytescale.train.prepare import Prepared
from bytescale.train.resuming.facts import changes, check_unchanged, made_by
from bytescale.train.resuming.origin import Origin, find_origin
from bytescale.train.resuming.start import Start


def check_resume(prepared: Prepared, world_size: int) -> tuple[str, ...]:
    """Whether the run can go on from the newest checkpoint that can be read, as far as this is known without ranks.

    Returns:
        Lines that say from which one, and what has changed since; none for the beginning.

    Raises:
        UserError: it cannot.
    """
    config = prepared.config
    origin = find_origin(config)
    for path in origin.paths:
        try:
            stored = read_checkpoint(path)
        except UserError:
            if origin.is_asked:
                raise
            continue
        now = made_by(config, prepared, world_size)
        _check_goes_on(stored, origin, config, now)
        return _lines("goes on", stored, now)
    _check_any(origin)
    return ()


def resume(
    config: Config, prepared: Prepared, world: World, model: LossModel, optimizer: torch.optim.Optimizer
) -> Start:
    """Bring `model` and `optimizer` to the state of the checkpoint that `config` asks for; a collective.

    Raises:
        UserError: there is none, it is damaged, or of another run.
    """
    with collective(world.rank, "looking for a checkpoint"):
        origin: Origin = _from_first(world, find_origin(config) if world.rank == 0 else None)
        stored, notes = _first_sound(origin, world)
    if stored is None:
        return Start(origin, restarts=restart_count())
    now = made_by(config, prepared, world.size)
    _check_goes_on(stored, origin, config, now)
    if stored.values["is_tied"] != model.is_tied:
        there, here = ("tied", "not tied") if stored.values["is_tied"] else ("not tied", "tied")
        raise UserError(f"{stored.path} was made with a head that is {there} to the embedding, the model's is {here}")
    with collective(world.rank, "reading the checkpoint"), stored.tensors() as reader:
        make_optimizer_state(model, optimizer, stored.index)
        reader.load(model_slices(model) + optimizer_slices(model, optimizer))
        # Nobody goes on, and removes or replaces files, while another one still reads.
        world.all_gather_numbers([0.0])
    values = stored.values
    return Start(
        origin=origin,
        step=values["step"],
        loader=LoaderState.from_dict(values["loader"]),
        num_skipped_in_a_row=values["num_skipped_in_a_row"],
        restarts=max(values["restarts"] + 1, restart_count()),
        totals=values["totals"],
        notes=(*notes, *_lines("resumed", stored, now)),
    )


def _lines(word: str, stored: StoredCheckpoint, now: Mapping[str, Any]) -> tuple[str, ...]:
    changed = changes(stored.values["made_by"], now)
    line = f"{word} from {shown(stored.path)}, after step {stored.values['step']}"
    return (line, *([f"changed since: {', '.join(changed)}"] if changed else []))


def _first_sound(origin: Origin, world: World) -> tuple[StoredCheckpoint | None, Sequence[str]]:
    notes: list[str] = []
    for path in origin.paths:
        stored, problem = _proven(path, world)
        problems: list[Any] = [None] * world.size
        dist.all_gather_object(problems, problem, group=world.everyone)
        found = next((p for p in problems if p is not None), None)
        if found is None:
            return stored, notes
        if origin.is_asked:
            raise UserError(found)
        notes.append(f"{shown(path)} is not used: {found}")
    _check_any(origin)
    return None, notes


def _proven(path: Path, world: World) -> tuple[StoredCheckpoint | None, str | None]:
    """The checkpoint, or what is wrong with it as far as this rank has looked."""
    try:
        stored = read_checkpoint(path)
    except UserError as error:
        return None, str(error)
    return stored, stored.damage(world.rank, world.size)


def _check_goes_on(stored: StoredCheckpoint, origin: Origin, config: Config, now: Mapping[str, Any]) -> None:
    """Whether a run of `config`, made by `now`, can go on from `stored`, and has something to do."""
    check_unchanged(stored.values["made_by"], now, stored.path)
    step, steps = stored.values["step"], config.train.steps
    # A run that was killed between its last checkpoint and its end has only its files to finish.
    if step > steps or (step == steps and not origin.goes_on):
        raise UserError(
            f"{stored.path} was made after step {step}, and train.steps = {steps}: nothing is left to train; raise "
            "train.steps"
        )


def _check_any(origin: Origin) -> None:
    if origin.paths:
        newest = origin.paths[0]
        raise UserError(
            f"no checkpoint in {newest.parent} is sound, the newest is {newest.name}; move them away, or set "
            "checkpoint.resume = off and choose another run.dir"
        )


def _from_first(world: World, value: Any) -> Any:
    """The value of rank 0; a collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0, group=world.everyone)
    return values[0]
