"""Where a run computes, decided from facts: every rule is tried here without a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bytescale.config.schema import Config
from bytescale.config.toml import load_config
from bytescale.errors import UserError
from bytescale.runtime.attention.kernels import check_kernel
from bytescale.runtime.device import Machine, choose_device, device_note, resolve
from bytescale.train.prepare import prepare
from tests.train.runs import write_run

NO_GPU, ONE_GPU, FOUR_GPUS = Machine(0, 4), Machine(1, 4), Machine(4, 4)


@pytest.mark.parametrize(
    ("machine", "device", "dtype"),
    [
        (NO_GPU, "cpu", "float32"),
        (ONE_GPU, "cpu", "float32"),
        (FOUR_GPUS, "cuda", "bfloat16"),
        (Machine(8, 4), "cuda", "bfloat16"),
        (Machine(1, 1), "cuda", "bfloat16"),
    ],
)
def test_the_quickstart_finds_its_device(machine: Machine, device: str, dtype: str) -> None:
    config = resolve(load_config(Path("configs/quickstart.toml")), machine)
    assert (config.train.device, config.train.dtype) == (device, dtype)
    assert resolve(config, machine) == config


def test_one_line_says_why_gpus_stay_idle() -> None:
    config = load_config(Path("configs/quickstart.toml"))
    assert device_note(config, ONE_GPU) == "on the CPU: 1 GPU for 4 ranks; to use CUDA start at most 1 rank (--nproc)"
    assert device_note(config, NO_GPU) is None and device_note(config, FOUR_GPUS) is None


@pytest.mark.parametrize(("machine", "way_out"), [(NO_GPU, 'set train.device = "cpu"'), (ONE_GPU, "start 1 rank here")])
def test_cuda_is_refused_without_a_gpu_for_every_rank(machine: Machine, way_out: str) -> None:
    with pytest.raises(UserError, match="needs a GPU for each of 4 ranks") as refused:
        choose_device("cuda", machine)
    assert way_out in str(refused.value)
    assert choose_device("cpu", machine) == "cpu"


def _run(tmp_path: Path, **train: str) -> Config:
    config = load_config(write_run(tmp_path))
    return replace(config, train=replace(config.train, **train))  # type: ignore[arg-type]


def test_the_check_refuses_what_cuda_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'train.dtype = "float32" has no attention kernel on CUDA'):
        prepare(_run(tmp_path, dtype="float32"), 4, FOUR_GPUS)
    config = _run(tmp_path)
    assert config.model.config is not None
    odd = replace(config, model=replace(config.model, config=config.model.config | {"head_dim": 12}))
    with pytest.raises(UserError, match="heads have 12 elements"):
        prepare(odd, 4, FOUR_GPUS)
    assert prepare(odd, 4, ONE_GPU).config.train.device == "cpu"
    prepared = prepare(config, 4, FOUR_GPUS)
    assert prepared.config.train.dtype == "bfloat16" and prepared.shape.dtype_bytes == 2
    assert "1 GPU for 4 ranks" in prepare(config, 4, ONE_GPU).notes[0]


@pytest.mark.parametrize("head_dim", [8, 64, 256])
def test_head_sizes_of_cuda(head_dim: int) -> None:
    check_kernel("cuda", torch.bfloat16, head_dim)
    check_kernel("cpu", torch.float32, head_dim + 1)
    for wrong in (head_dim + 1, 264):
        with pytest.raises(UserError, match=f"heads have {wrong} elements"):
            check_kernel("cuda", torch.bfloat16, wrong)


def test_offloading_on_cuda_waits_for_a_profile(tmp_path: Path) -> None:
    """Without measured copies nothing is offloaded there, and what would need it is refused with the way out."""
    config = _run(tmp_path)
    assert config.model.config is not None
    deeper = replace(config.model, config=config.model.config | {"num_hidden_layers": 8})
    config = replace(config, model=deeper, plan=replace(config.plan, tokens_per_rank=32))
    assert prepare(config, 8, Machine(0, 8)).config.plan.offload == "auto"
    with pytest.raises(UserError, match=r"set plan.offload = 1.0"):
        prepare(config, 8, Machine(8, 8))
    assert resolve(config, FOUR_GPUS).plan.offload == "off"
    profiled = replace(config, plan=replace(config.plan, profile="profile.json"))
    assert resolve(profiled, FOUR_GPUS).plan.offload == "auto"
