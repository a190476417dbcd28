"""Who may import what: the library needs numpy alone, and no command but training brings torch."""

import importlib.util
import subprocess
import sys

import pytest

LIBRARY = [
    "bytescale",
    "bytescale.config.schema",
    "bytescale.plan.file",
    "bytescale.trace",
    "bytescale.cost",
    "bytescale.lengths.source",
    "bytescale.planner",
    "bytescale.reproduction.catalogue",
    "bytescale.data",
    "bytescale.simulator",
]
ONLY_NUMPY = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top not in sys.stdlib_module_names and top not in ("numpy", "bytescale", "__editable___bytescale_finder"):
            raise ModuleNotFoundError(f"{name} is blocked in this test", name=name)

sys.meta_path.insert(0, Blocker())
import importlib
importlib.import_module(sys.argv[1])
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("module", [name for name in LIBRARY if importlib.util.find_spec(name) is not None])
def test_the_library_needs_numpy_alone(module: str) -> None:
    result = python(ONLY_NUMPY, module)
    assert result.returncode == 0, result.stderr


def test_the_block_blocks() -> None:
    assert "click is blocked" in python(ONLY_NUMPY, "bytescale.cli").stderr


def test_help_of_every_command_comes_without_torch() -> None:
    code = """
import sys
from bytescale.cli import _COMMANDS, main
for words in [[], ["--help"], *([name, "--help"] for name in _COMMANDS)]:
    assert main(words) == 0, words
heavy = {"torch", "transformers", "ray", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""
    result = python(code)
    assert result.returncode == 0, result.stderr
