"""A strategy is one file and one entry in one table: added so to a copy of the package, it plans and trains."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bytescale
from tests.train.runs import environment, metrics, write_run

pytestmark = pytest.mark.long

MODULE = '''"""`all-ranks`: every sequence over all ranks, one micro-batch after the other."""

import numpy as np

from bytescale.plan.step_plan import StepPlan
from bytescale.planner.parts.rows import plan_of_groups
from bytescale.planner.problem import Problem


def plan_all_ranks(problem: Problem) -> StepPlan:
    """The least a strategy can do."""
    num, hdp_size = problem.num_sequences, problem.hdp_size
    return plan_of_groups(
        problem,
        "all-ranks",
        sequence=np.arange(num),
        degree=np.full(num, hdp_size),
        ranks=np.tile(np.arange(hdp_size), num),
        micro_batches=np.repeat(np.arange(num), hdp_size),
    )
'''
ENTRY = "from bytescale.planner.strategies.all_ranks import plan_all_ranks\n"
TABLE = "PLAIN = (\n"


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds the package with the strategy added."""
    root = tmp_path_factory.mktemp("package")
    package = root / "bytescale"
    shutil.copytree(Path(bytescale.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "planner" / "strategies" / "all_ranks.py").write_text(MODULE)
    table = package / "planner" / "__init__.py"
    text = table.read_text()
    assert TABLE in text
    entry = f'{TABLE}    Strategy("all-ranks", "every sequence over all ranks", plan_all_ranks),\n'
    table.write_text(text.replace(TABLE, ENTRY + entry, 1))
    return root


def run(root: Path, *words: object) -> subprocess.CompletedProcess[str]:
    variables = environment() | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "bytescale", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=variables, check=False)


def test_it_is_planned_and_compared(extended: Path) -> None:
    words = ["--lengths", "wikipedia", "--batch-tokens", "64K", "--ranks", "4", "--json"]
    result = run(extended, "compare", *words)
    assert result.returncode == 0, result.stderr
    assert {"all-ranks", "best"} <= {row["strategy"] for row in json.loads(result.stdout)}


def test_it_trains(extended: Path, tmp_path: Path) -> None:
    config = write_run(tmp_path)
    losses = []
    for strategy in ("all-ranks", "hdp-naive"):
        directory = tmp_path / strategy
        words = ["--nproc", 2, "--train.steps", 2, "--plan.strategy", strategy, "--run.dir", directory]
        result = run(extended, "train", config, *words)
        assert result.returncode == 0, result.stderr
        losses.append([line["loss"] for line in metrics(directory)])
        assert metrics(directory)[0]["cp_degree_max"] == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
