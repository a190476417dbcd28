"""Proof that the ranks run the same thing: the same run at the start, the same step before every step.

At the start one number of every rank is compared, a digest of versions, configuration, data and start weights; only
where the numbers differ are the facts themselves gathered, to name what differs. Places in the file system and what a
machine can spare may differ between ranks. Before every step the digest of its plan and its batch is compared.

Cost: one number a rank; at the start one pass over the parameters.
"""

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bytescale.config.schema import Config
from bytescale.data import SequenceDataset, StepData
from bytescale.errors import CommunicationError, UserError
from bytescale.runtime.world import World

_PACKAGES = ("bytescale", "torch", "transformers", "numpy")
_MAY_DIFFER = frozenset({"offload.limit_bytes", "train.compute_threads", "data.workers"})
"""Keys that only concern one machine, besides all that are places in the file system."""


def versions() -> dict[str, str]:
    """Versions of the interpreter and of what decides results."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def run_facts(config: Config, dataset: SequenceDataset, held_out: SequenceDataset | None = None) -> dict[str, str]:
    """What must be equal on all ranks: name -> value."""
    facts = {f"the version of {name}": value for name, value in versions().items()}
    facts |= {key: repr(value) for key, value in _shared_settings(config).items()}
    facts["its data (digest of lengths and tokens)"] = dataset_digest(dataset)
    if held_out is not None:
        facts["its held-out data (digest of lengths and tokens)"] = dataset_digest(held_out)
    return facts


def _shared_settings(config: Config) -> dict[str, Any]:
    sections = {name: _without_places(section) for name, section in vars(config).items()}
    settings = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {key: value for key, value in settings.items() if key not in _MAY_DIFFER}


def _without_places(section: Any) -> dict[str, Any]:
    """The keys of a section, or of one of its tables, that are no places in the file system."""
    values = {key.name: getattr(section, key.name) for key in fields(section) if not key.metadata.get("path")}
    tables = {k: v for k, v in values.items() if isinstance(v, tuple) and v and is_dataclass(v[0])}
    return values | {key: [_without_places(entry) for entry in entries] for key, entries in tables.items()}


def dataset_digest(dataset: SequenceDataset) -> str:
    """A fingerprint of all lengths and of tokens spread evenly over the data."""
    hasher = hashlib.blake2b(digest_size=8)
    for column in (dataset.lengths, dataset.num_targets):
        hasher.update(column.tobytes())
    hasher.update(dataset.reader.digest().encode())
    return hasher.hexdigest()


def weights_digest(model: nn.Module) -> str:
    """A fingerprint of the bits of all parameters, by name."""
    hasher = hashlib.blake2b(digest_size=8)
    for name, parameter in model.named_parameters():
        bits = parameter.detach().contiguous().view(torch.uint8).flatten()
        bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(torch.int64)
        # Wrapping sums of the bits and of half of them: two numbers that any change of a weight changes.
        sums = [int(bits.sum()), int(bits[::2].sum())]
        hasher.update(f"{name}{tuple(parameter.shape)}{sums}".encode())
    return hasher.hexdigest()


def check_same_run(world: World, facts: Mapping[str, str], weights: str) -> None:
    """Prove that all ranks agree on `facts`, and the ranks of every stage on their start `weights`; a collective.

    Raises:
        UserError: names a rank, what differs, and both values.
    """
    digests = _gather_digests(world, [_digest(facts), _digest({"weights": weights})])
    first_of_stage = [rank - rank % world.stage_size for rank in range(world.size)]
    if all(
        shared == digests[0][0] and own == digests[first][1]
        for (shared, own), first in zip(digests, first_of_stage, strict=True)
    ):
        return
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, (dict(facts), weights), group=world.everyone)
    for rank, (theirs, _) in enumerate(everyone):
        for name in sorted({*theirs, *everyone[0][0]}):
            _check_equal(rank, 0, name, theirs.get(name, "absent"), everyone[0][0].get(name, "absent"))
    for rank, first in enumerate(first_of_stage):
        _check_equal(rank, first, "its start weights (digest)", everyone[rank][1], everyone[first][1])


def _check_equal(rank: int, other: int, name: str, value: str, expected: str) -> None:
    if value != expected:
        raise UserError(
            f"rank {rank} differs from rank {other} in {name}: {value[:40]} against {expected[:40]}; start all "
            "ranks with the same configuration, data and versions"
        )


def check_same_step(world: World, data: StepData) -> None:
    """Prove that all ranks are about to run the same plan on the same sequences; a collective of one number.

    Raises:
        CommunicationError: names a rank with another one. Running on would hang or mix up sequences.
    """
    digests = _gather_digests(world, [step_digest(data)])
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise CommunicationError(
                f"rank {world.rank}: step {data.step}: rank {rank} made another plan than rank 0; the ranks must see "
                "the same data, configuration and version"
            )


def step_digest(data: StepData) -> int:
    """A 63-bit fingerprint of which sequences a step trains on, and where every token goes."""
    plan, pieces = data.plan, data.plan.pieces
    hasher = hashlib.blake2b(plan.hdp_size.to_bytes(8, "little"), digest_size=8)
    for column in (data.batch.sequence_ids, data.batch.num_targets, plan.lengths):
        hasher.update(column.tobytes())
    for name in (f.name for f in fields(pieces)):
        column = getattr(pieces, name)
        if column is not None:
            hasher.update(name.encode())
            hasher.update(column.tobytes())
    return int.from_bytes(hasher.digest(), "little") >> 1


def _digest(facts: Mapping[str, str]) -> int:
    text = "\n".join(f"{name}={facts[name]}" for name in sorted(facts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _gather_digests(world: World, own: list[int]) -> list[list[int]]:
    """The numbers of all ranks, a row each; a collective."""
    mine = torch.tensor(own, dtype=torch.int64)
    everyone = mine.new_empty(world.size * len(own))
    dist.all_gather_single(everyone, mine, group=world.everyone)
    rows: list[list[int]] = everyone.view(world.size, len(own)).tolist()
    return rows
