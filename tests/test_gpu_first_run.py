"""The script that is ready for a first GPU runs its checks here, on the CPU."""

from pathlib import Path

import torch

from benchmarks.gpu_first_run import TOLERANCE, commands, kernel_checks
from bytescale.config.overrides import parse_overrides
from bytescale.config.toml import load_config
from bytescale.runtime.attention.kernels import select_kernel


def test_every_kernel_check_passes_on_the_cpu() -> None:
    errors = {name: check() for name, check in kernel_checks(select_kernel(torch.device("cpu"))).items()}
    assert max(errors.values()) <= TOLERANCE, errors


def test_its_commands_are_sound(tmp_path: Path) -> None:
    for words in commands("cpu", 2, tmp_path).values():
        known = ("--nproc", "--out", "--max-length", "--rounds")
        options = [word for pair in zip(words[2::2], words[3::2], strict=True) if pair[0] not in known for word in pair]
        overrides, rest = parse_overrides(options, ())
        assert not rest
        config = load_config(Path(words[1]), overrides)
        assert config.train.device == "cpu"
        # One rank alone must hold the longest sequence: nobody knows how many GPUs there will be.
        assert words[0] == "profile" or config.plan.tokens_per_rank >= config.data.max_context
