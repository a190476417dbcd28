"""Pipelines of two stages through the command line: checkpointing and offloading, and the trace of a run."""

from pathlib import Path

import pytest

from bytescale.config.overrides import parse_overrides
from bytescale.config.toml import load_config
from bytescale.cost import preset_cost
from bytescale.data import StepLoader
from bytescale.simulator import simulate, step_spans
from bytescale.trace import Span, last_step, read_trace
from bytescale.train.prepare import prepare
from tests.traces import check_trace
from tests.train.runs import metrics, train, write_run

pytestmark = pytest.mark.long

STEPS = 3
CHECKPOINTING = ("--train.activation_checkpointing", "full")
OFFLOADING = ("--plan.offload", 1.0, "--offload.min_bytes", 1024)


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers, four a stage, of which two may leave."""
    path = write_run(tmp_path_factory.mktemp("pipelines"))
    text = path.read_text().replace("num_hidden_layers = 2", "num_hidden_layers = 8").replace("steps = 20", "steps = 3")
    path.write_text(f"{text}save_model = false\n\n[parallel]\npp_size = 2\n")
    return path


def run(config_path: Path, hdp_size: int, *options: object) -> Path:
    """The directory of a run of `hdp_size` pipelines, 600 tokens on all of them together."""
    run_dir = config_path.parent / "_".join(map(str, (hdp_size, *options)))
    if not run_dir.exists():
        words = ("--nproc", 2 * hdp_size, "--run.dir", run_dir, "--plan.tokens_per_rank", 600 // hdp_size)
        done = train(config_path, *words, *options)
        assert done.returncode == 0, done.stderr
        (run_dir / "output.txt").write_text(done.stdout)
    return run_dir


def by_track(spans: list[Span]) -> dict[tuple[int, str], list[str]]:
    """Names of the operations on each track, in order of time."""
    chosen = [span for span in spans if span.category in ("forward", "backward")]
    return {
        track: [span.name for span in sorted(chosen, key=lambda s: s.start_s) if (span.rank, span.track) == track]
        for track in {(span.rank, span.track) for span in chosen}
    }


@pytest.mark.parametrize("hdp_size", [1, 2])
def test_the_trace_has_the_tracks_and_operations_of_the_simulator(config_path: Path, hdp_size: int) -> None:
    path = run(config_path, hdp_size) / "trace.json"
    events = check_trace(path.read_text())
    assert all({"micro_batch", "sequence_ids", "tokens"} <= set(e["args"]) for e in events if e["cat"] == "forward")
    spans = read_trace(path)
    overrides, _ = parse_overrides(("--plan.tokens_per_rank", str(600 // hdp_size)))
    config = load_config(config_path, overrides)
    prepared = prepare(config, 2 * hdp_size)
    with StepLoader(prepared.dataset, config.batch, 0, prepared.planner, 0, num_steps=STEPS) as loader:
        plan = [data.plan for data in loader][-1]
    predicted = step_spans(simulate(plan, preset_cost("llama-7b", "h100")), range(hdp_size))
    found = by_track(last_step(spans))
    assert found == by_track(predicted)
    assert set(found) == {(rank, f"stage {stage}") for rank in range(hdp_size) for stage in range(2)}
    assert sum(map(len, found.values())) > 8


@pytest.mark.parametrize(
    ("hdp_size", "options"),
    [(1, OFFLOADING), (2, CHECKPOINTING), (1, CHECKPOINTING + OFFLOADING), (2, CHECKPOINTING + OFFLOADING)],
    ids=["1-offloading", "2-checkpointing", "1-both", "2-both"],
)
def test_less_memory_gives_the_same_losses(config_path: Path, hdp_size: int, options: tuple[object, ...]) -> None:
    run_dir = run(config_path, hdp_size, *options)
    expected, found = metrics(run(config_path, hdp_size)), metrics(run_dir)
    assert len(found) == len(expected) == STEPS
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert (ours["offload_bytes_out"] > 0) == (OFFLOADING[0] in options)
        assert ours["offload_bytes_in"] == ours["offload_bytes_out"]
        assert ours["offload_declined_bytes"] == 0
    output = (run_dir / "output.txt").read_text()
    assert "PP bubble" in output and "DP bubble" in output
    assert ("exposed" in output) == (OFFLOADING[0] in options)
