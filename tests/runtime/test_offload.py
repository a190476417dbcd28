"""Offloading moves activations and changes nothing: gradients bit for bit, views, sharing, limits, failures."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bytescale.plan.step_plan import StepPlan
from bytescale.runtime.attention.kernels import CpuKernel
from bytescale.runtime.fsdp import full_gradients, shard_model
from bytescale.runtime.model.decoder import LossModel, recompute_layers
from bytescale.runtime.offload.disk import DiskTier
from bytescale.runtime.offload.offloader import Offloader, OffloadReport, _Entry
from bytescale.runtime.offload.tiers import LeavingRows, Partition, leaving_rows, partition
from bytescale.train.measure.peak_memory import peak_memory_bytes, reset_peak_memory
from bytescale.train.step import run_step
from tests.plans import columns_of, placed, rebuilt
from tests.ranks import RankPool, Ranks
from tests.runtime.models import small_decoder, step_data, world_of

RATIOS = (0.0, 0.3, 0.5, 1.0)
NUM_LAYERS = 5


def plan_at(degree: int, ratio: float) -> StepPlan:
    """A long sequence at `degree` beside short ones, each with its own ratio, in two micro-batches a rank."""
    lengths = [211, 30, 97, 64]
    everyone = [(rank, 0) for rank in range(degree)]
    plan = placed(lengths, [everyone, [(0, 0)], [(rank, 1) for rank in range(degree)], [(0, 1)]], degree)
    columns = columns_of(plan)
    columns["offload_ratio"] = [ratio if s != 1 else ratio / 2 for s in columns["sequence"]]
    return rebuilt(plan, columns)


def compare(
    ranks: Ranks, directory: str, dtype: torch.dtype, checkpointing: bool, tp_size: int = 1
) -> list[tuple[float, str, int, int]]:
    """(ratio, first gradient that differs, bytes out, bytes in) of every ratio, over three AdamW steps each."""
    decoder = small_decoder("llama", num_hidden_layers=NUM_LAYERS).train()
    if checkpointing:
        recompute_layers(decoder)
    model, world = LossModel(decoder), world_of(ranks, tp_size=tp_size)
    shard_model(model, world, dtype)
    weights = [p.detach().clone() for p in model.parameters()]

    def three_steps(ratio: float, offloader: Offloader | None) -> tuple[list[dict[str, torch.Tensor]], list[Any]]:
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.copy_(weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        gradients, reports = [], []
        for step in range(1, 4):
            data = step_data(plan_at(world.hdp_size, ratio), world.hdp_rank, step=step)
            reports.append(run_step(model, CpuKernel(), world, data, offloader).offload)
            gradients.append({name: g.clone() for name, g in full_gradients(model).items()})
            optimizer.step()
            optimizer.zero_grad()
        return gradients, reports

    expected, _ = three_steps(0.0, None)
    offloader = Offloader(model, lambda: DiskTier(Path(directory), 1 << 30), 512)
    rows = []
    for ratio in RATIOS:
        found, reports = three_steps(ratio, offloader)
        differing = [
            f"step {step} {name}"
            for step, (ours, theirs) in enumerate(zip(found, expected, strict=True), start=1)
            for name in theirs
            if not torch.equal(ours[name], theirs[name])
        ]
        moved = [sum(getattr(report, key) for report in reports) for key in ("bytes_out", "bytes_in")]
        rows.append((ratio, differing[0] if differing else "", *moved))
    offloader.close()
    return rows


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("degree", [1, *(pytest.param(degree, marks=pytest.mark.long) for degree in (2, 3, 4))])
def test_gradients_are_bitwise_equal(
    ranks: RankPool, tmp_path: Path, degree: int, dtype: torch.dtype, checkpointing: bool
) -> None:
    for rows in ranks.run(degree, compare, str(tmp_path), dtype, checkpointing):
        moved = {}
        for ratio, differing, bytes_out, bytes_in in rows:
            assert not differing, (ratio, differing)
            assert bytes_out == bytes_in
            moved[ratio] = bytes_out
        assert moved[0.0] == 0
        assert 0 < moved[0.3] < moved[0.5] < moved[1.0]
        assert moved[0.5] == pytest.approx(moved[1.0] / 2, rel=0.1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_what_tensor_parallel_ranks_hold_moves_too(ranks: RankPool, tmp_path: Path) -> None:
    for rows in ranks.run(4, compare, str(tmp_path), torch.float32, False, 2):
        assert [differing for _, differing, *_ in rows] == [""] * len(rows)
        moved = {ratio: (bytes_out, bytes_in) for ratio, _, bytes_out, bytes_in in rows}
        assert moved[1.0][0] == moved[1.0][1] > moved[0.5][0] > 0


# One process, a stand-in for the model: layers that save what a test wants them to.


class Layers(torch.nn.Module):
    """`num` layers, each a function of the hidden state; the last two always stay."""

    def __init__(self, num: int, function: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64, 64))
        self.layers = torch.nn.ModuleList(Layer(function, self.weight) for _ in range(num))

    def forward(self, hidden: torch.Tensor, **shared: Any) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, **shared)
        return hidden


class Layer(torch.nn.Module):
    def __init__(self, function: Any, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.function = function
        self.__dict__["weight_of_all"] = weight

    def forward(self, hidden: torch.Tensor, **shared: Any) -> torch.Tensor:
        return self.function(hidden, self.weight_of_all, **shared)


class RecordingTier(DiskTier):
    """Counts the storages it is given."""

    def __init__(self, directory: Path, limit_bytes: int = 1 << 30) -> None:
        super().__init__(directory, limit_bytes)
        self.stored: list[int] = []

    def store(self, source: torch.Tensor, cut: Any) -> Any:
        self.stored.append(source.numel())
        return super().store(source, cut)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[RecordingTier]:
    made = RecordingTier(tmp_path)
    yield made
    made.close()


def gradients_of(
    model: Layers, offloader: Offloader | None, tokens: list[int], ratios: list[float], **shared: Any
) -> Any:
    hidden = torch.linspace(-1, 1, sum(tokens) * 64).view(1, -1, 64).requires_grad_()
    model.weight.grad = None
    if offloader is None:
        out = model(hidden, **shared)
    else:
        offloader.begin_step()
        with offloader.micro_batch(tokens, ratios):
            out = model(hidden, **shared)
    out.sum().backward()
    return hidden.grad, model.weight.grad


def check_equal(model: Layers, tier: Any, tokens: list[int], ratios: list[float], **shared: Any) -> OffloadReport:
    expected = gradients_of(model, None, tokens, ratios, **shared)
    offloader = Offloader(model, lambda: tier, 1024)  # type: ignore[arg-type]
    found = gradients_of(model, offloader, tokens, ratios, **shared)
    report = offloader.report()
    offloader.close = lambda: None  # type: ignore[method-assign]  # the fixture closes the tier
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)
    return report


def test_a_storage_seen_through_many_views_moves_once(tier: RecordingTier) -> None:
    def function(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = hidden.exp()  # saved as an output, then through three views
        heads = x.view(1, -1, 4, 16).transpose(1, 2)
        return (x * x[..., :1] + (heads * heads).sum(1, keepdim=False).sum(-1, keepdim=True)) * 1e-3

    report = check_equal(Layers(4, function), tier, [40], [1.0])
    size = 40 * 64 * 4
    # Per layer: x once. The layer's own input is not saved by exp.
    assert tier.stored.count(size) == 2
    assert report.bytes_out == report.bytes_in >= 2 * size


@pytest.mark.parametrize("ratios", [[1.0, 0.0, 0.5], [0.0, 1.0, 0.25], [0.3, 0.3, 0.3]])
def test_views_and_slices_of_a_split_storage_come_back(tier: RecordingTier, ratios: list[float]) -> None:
    def function(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        fused = torch.tanh(hidden @ weight * 1e-2)
        a, b = fused.split(32, dim=-1)  # each a view of half a storage
        c = (a.transpose(1, 2) * b.transpose(1, 2)).contiguous()  # tokens are not the outermost dimension
        d = c.sigmoid()
        return torch.cat([d.transpose(1, 2), a], dim=-1) + hidden * fused.mean()

    report = check_equal(Layers(5, function), tier, [31, 7, 26], ratios)
    assert report.bytes_out > 0


def test_storage_without_a_token_dimension_gives_its_share(tier: RecordingTier) -> None:
    def function(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = hidden[0].repeat_interleave(3, dim=0)[:-5]  # as experts see them: other rows than tokens
        return hidden + (rows * rows).exp().sum() * 1e-9

    assert check_equal(Layers(4, function), tier, [50], [0.5]).bytes_out > 0


def test_parameters_and_shared_tables_stay(tier: RecordingTier) -> None:
    table = torch.randn(1, 40, 64)

    def function(hidden: torch.Tensor, weight: torch.Tensor, tables: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return (hidden @ weight.t()) * tables[0]

    model = Layers(4, function)
    check_equal(model, tier, [40], [1.0], tables=(table,))
    # hidden is saved for the gradient of the weight in layers 0 and 1; weight and table are seen and stay.
    assert tier.stored == [40 * 64 * 4] * 2


def test_a_tensor_saved_again_in_a_later_layer_moves_once(tier: RecordingTier) -> None:
    memory: list[torch.Tensor] = []

    def function(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not memory:
            memory.append(hidden * 2)
        return hidden + memory[0] * memory[0] * 1e-3

    model = Layers(6, function)
    expected = gradients_of(model, None, [40], [1.0])
    memory.clear()
    offloader = Offloader(model, lambda: tier, 1024)  # type: ignore[arg-type]
    found = gradients_of(model, offloader, [40], [1.0])
    assert torch.equal(found[0], expected[0])
    assert len(tier.stored) == 1


def test_interleaved_micro_batches(tier: RecordingTier) -> None:
    """Forwards and backwards as a pipeline orders them: F0 F1 B0 F2 B1 B2."""

    def function(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden @ weight * 1e-2) + hidden

    model = Layers(5, function)

    def run(offloader: Offloader | None) -> torch.Tensor:
        model.weight.grad = None
        outs: dict[int, torch.Tensor] = {}
        for what, number in ("F0", "F1", "B0", "F2", "B1", "B2"):
            if what == "B":
                outs.pop(int(number)).sum().backward()
                continue
            tokens = 30 + int(number)
            hidden = torch.linspace(-1, int(number), tokens * 64).view(1, -1, 64)
            if offloader is None:
                outs[int(number)] = model(hidden)
            else:
                with offloader.micro_batch([tokens], [0.5]):
                    outs[int(number)] = model(hidden)
        assert model.weight.grad is not None
        return model.weight.grad.clone()

    expected = run(None)
    offloader = Offloader(model, lambda: tier, 1024)  # type: ignore[arg-type]
    offloader.begin_step()
    assert torch.equal(run(offloader), expected)
    report = offloader.report()
    assert report.bytes_in == report.bytes_out > 0


def wait_until(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_what_left_is_freed_and_an_abandoned_graph_gives_its_room_back(tier: RecordingTier) -> None:
    seen: list[StorageWeakRef] = []

    def function(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = hidden.exp()
        seen.append(StorageWeakRef(out.untyped_storage()))
        return out * 1e-3

    model = Layers(5, function)
    offloader = Offloader(model, lambda: tier, 1024)  # type: ignore[arg-type]
    for _ in range(3):
        seen.clear()
        offloader.begin_step()
        with offloader.micro_batch([40], [1.0]):
            out = model(torch.ones(1, 40, 64, requires_grad=True))
        # The thread that wrote a tensor lets go of it a moment after it says so.
        wait_until(lambda: [ref.expired() for ref in seen] == [True, True, True, False, False])
        del out
        gc.collect()
        assert all(ref.expired() for ref in seen)
        offloader.report()
    # The room of one step served all three.
    tier._room._take_returned()
    assert tier._room._size <= 64 << 20
    assert [end - begin for begin, end in tier._room._free] == [tier._room._size]


def test_room_is_given_back_while_room_is_taken(tier: RecordingTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cyclic collection may run a finalizer inside `take`, on the same thread."""
    source = torch.zeros(1 << 20, dtype=torch.uint8)
    stash = tier.store(source, Partition(((0, 1 << 20),), ()))
    assert stash is not None
    entry = _Entry(stash, source.untyped_storage(), 1 << 20)
    stash.settle()
    cycle: list[Any] = [entry]
    cycle.append(cycle)
    room, grow = tier._room, tier._room._grow
    del entry, cycle, stash

    def collecting(num_bytes: int) -> bool:
        gc.collect()
        return grow(num_bytes)

    monkeypatch.setattr(room, "_grow", collecting)
    taken: list[int | None] = []
    thread = threading.Thread(target=lambda: taken.append(room.take(128 << 20)), daemon=True)
    thread.start()
    thread.join(30)
    assert taken and taken[0] is not None, "take waits for itself"
    room.give_back(taken[0], 128 << 20)
    room._take_returned()
    assert [end - begin for begin, end in room._free] == [room._size]


def test_resident_memory_falls(tier: RecordingTier) -> None:
    """Ten layers of 16 MiB; the benchmark measures a real model."""
    model, cpu = Layers(10, lambda hidden, weight: hidden.exp() * 1e-3), torch.device("cpu")
    hidden = torch.zeros(1, 65536, 64, requires_grad=True)

    def growth(ratio: float) -> int:
        offloader = Offloader(model, lambda: tier, 1024)  # type: ignore[arg-type]
        offloader.begin_step()
        hidden.grad = None
        reset_peak_memory(cpu)
        before = peak_memory_bytes(cpu)
        with offloader.micro_batch([65536], [ratio]):
            out = model(hidden)
        out.backward(hidden.detach())
        offloader.report()
        return peak_memory_bytes(cpu) - before

    plain, offloaded = growth(0.0), growth(1.0)
    assert plain > 140 << 20
    assert offloaded < 0.6 * plain


@pytest.mark.parametrize("limit", [0, 3 * 4096])
def test_a_limit_stops_offloading_and_is_counted(tmp_path: Path, limit: int) -> None:
    tier = RecordingTier(tmp_path, limit)
    report = check_equal(Layers(8, lambda hidden, weight: hidden.exp() * 1e-3), tier, [16], [1.0])
    assert report.bytes_out == limit
    assert report.declined_bytes == 6 * 16 * 64 * 4 - limit
    tier.close()


def test_a_full_disk_stops_offloading_and_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", no_space)
    tier = RecordingTier(tmp_path)
    report = check_equal(Layers(5, lambda hidden, weight: hidden.exp() * 1e-3), tier, [16], [1.0])
    assert (report.bytes_out, report.declined_bytes) == (0, 3 * 4096)
    tier.close()


def test_a_failed_write_keeps_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.pwrite", broken)
    tier = RecordingTier(tmp_path)
    report = check_equal(Layers(5, lambda hidden, weight: hidden.exp() * 1e-3), tier, [16], [0.5])
    assert (report.bytes_out, report.declined_bytes) == (0, 3 * 2048)
    tier.close()


def test_closing_ends_the_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    tier = RecordingTier(tmp_path)
    check_equal(Layers(4, lambda hidden, weight: hidden.exp() * 1e-3), tier, [16], [1.0])
    assert threading.active_count() == before + 2
    tier.close()
    assert threading.active_count() == before


def test_leaving_rows_round_up_and_merge() -> None:
    assert leaving_rows([10, 5, 0, 7], [0.3, 1.0, 1.0, 1.0]) == LeavingRows(22, ((0, 3), (10, 22)))
    assert leaving_rows([3], [0.5]).rows == ((0, 2),)
    assert leaving_rows([3, 4], [0.0, 0.0]).rows == ()


@pytest.mark.parametrize(
    ("tensor", "leaving", "staying"),
    [
        (torch.zeros(1, 8, 4), ((0, 32),), ((32, 128),)),
        (
            torch.zeros(1, 3, 8, 4).transpose(1, 2),
            ((0, 32), (128, 160), (256, 288)),
            ((32, 128), (160, 256), (288, 384)),
        ),
        (torch.zeros(8, 6)[:, 2:4], ((0, 48),), ((48, 192),)),
        (torch.zeros(5), ((0, 5),), ((5, 20),)),
        (torch.zeros(()).expand(8), ((0, 1),), ((1, 4),)),
    ],
)
def test_partition(tensor: torch.Tensor, leaving: Any, staying: Any) -> None:
    cut = partition(tensor, LeavingRows(8, ((0, 2),)))
    assert (cut.leaving, cut.staying) == (leaving, staying)
