"""A checkpoint of any layout, exported: what Transformers would save of the same model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bytescale import cli
from bytescale.checkpoint.directory import checkpoint_path
from bytescale.checkpoint.reader import TensorReader
from bytescale.checkpoint.slices import model_slices
from bytescale.checkpoint.stored import read_checkpoint
from bytescale.checkpoint.writer import CheckpointWriter
from bytescale.cli.results.export import find_source
from bytescale.config.schema import Config, ModelConfig, ParallelConfig
from bytescale.config.toml import config_to_dict
from bytescale.runtime.device import TORCH_DTYPES
from bytescale.runtime.fsdp import shard_model
from bytescale.runtime.model.decoder import LossModel
from bytescale.runtime.model.stages import stage_model
from bytescale.train.resuming.facts import model_facts
from bytescale.train.saving.export import export_model
from tests.ranks import RankPool, Ranks
from tests.runtime.models import UNEVEN, WITH_BUFFERS, even_stages, small_decoder, world_of
from tests.train.test_checkpoint import config_of, write_tokenizer

CASES: tuple[tuple[str, int, ParallelConfig, str, dict[str, Any]], ...] = (
    ("llama", 1, ParallelConfig(), "bfloat16", {"tie_word_embeddings": True}),
    ("llama", 4, ParallelConfig(pp_size=2), "float32", {"tie_word_embeddings": True}),
    ("llama", 3, ParallelConfig(), "float32", {"tie_word_embeddings": False, **UNEVEN}),
    ("llama", 8, ParallelConfig(pp_size=2, tp_size=2), "float32", {}),
    ("mixtral", 2, ParallelConfig(), "float32", {}),
    ("glm4_moe", 4, ParallelConfig(pp_size=2), "float32", WITH_BUFFERS),
)


def store(model: LossModel, config: Config, directory: Path, ranks: Ranks | None, facts: dict[str, Any]) -> None:
    """Write the checkpoint of step 3, of all ranks or of this process alone."""
    meeting: Any = dist.HashStore() if ranks is None else dist.FileStore(str(directory / "store"), ranks.size)  # type: ignore[attr-defined]
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    saver = CheckpointWriter(directory / "checkpoints", rank, size, meeting, keep=1, timeout_s=60, in_background=False)
    made_by = {"config": config_to_dict(config), "model": facts}
    saver.save(3, model_slices(model), {"step": 3, "is_tied": model.is_tied, "made_by": made_by})
    assert [saved.failure for saved in saver.ended()] == [None] * (rank == 0)


def _stored(
    ranks: Ranks, architecture: str, parallel: ParallelConfig, dtype: str, extra: dict[str, Any], directory: Path
) -> None:
    """Write a checkpoint of the model that seed 0 gives."""
    decoder = small_decoder(architecture, **extra)
    facts, world = model_facts(decoder.config), world_of(ranks, pp_size=parallel.pp_size, tp_size=parallel.tp_size)
    model = stage_model(decoder, even_stages(decoder, parallel.pp_size), world.stage)
    shard_model(model, world, TORCH_DTYPES[dtype])
    store(model, config_of(dtype=dtype), directory, ranks, facts)


@pytest.mark.parametrize(("architecture", "size", "parallel", "dtype", "extra"), CASES)
def test_it_is_what_transformers_would_save(
    ranks: RankPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    size: int,
    parallel: ParallelConfig,
    dtype: str,
    extra: dict[str, Any],
) -> None:
    ranks.run(size, _stored, architecture, parallel, dtype, extra, tmp_path)
    reads: list[str] = []
    whole = TensorReader.whole
    monkeypatch.setattr(TensorReader, "whole", lambda self, name: reads.append(name) or whole(self, name))
    exported = export_model(read_checkpoint(checkpoint_path(tmp_path / "checkpoints", 3)), tmp_path / "model")
    assert (exported.step, exported.dtype, exported.num_files) == (3, dtype, 1)
    assert len(reads) == len(set(reads))

    decoder = small_decoder(architecture, **extra).to(TORCH_DTYPES[dtype])
    decoder.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "theirs"))
    assert sorted(ours) == sorted(theirs)
    for name, weight in theirs.items():
        assert ours[name].dtype == weight.dtype and torch.equal(ours[name], weight), name
    tokens, logits = torch.arange(1, 40)[None], []
    for name in ("model", "theirs"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto", attn_implementation="eager")
        with torch.no_grad():
            logits.append(loaded.eval()(tokens).logits)
    assert torch.equal(*logits)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == (dtype, [type(decoder).__name__])


def store_alone(directory: Path, config: Config) -> Path:
    model = LossModel(small_decoder("llama"))
    store(model, config, directory, None, model_facts(model.decoder.config))
    return directory


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_alone(tmp_path_factory.mktemp("run"), config_of(dtype="bfloat16"))


def export(*words: object) -> int:
    return cli.main(["export", *map(str, words)])


def test_the_command(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = checkpoint_path(run_dir / "checkpoints", 3)
    (tmp_path / "empty").mkdir()
    assert export(run_dir, tmp_path / "empty") == 0
    assert capsys.readouterr().out.startswith(f"step 3 of {checkpoint} -> {tmp_path / 'empty'}: bfloat16, 1 file, ")
    assert export(checkpoint, tmp_path / "wide", "--dtype", "float32", "--json") == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "float32"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.toml").write_text(f'[checkpoint]\ndir = "{run_dir / "checkpoints"}"\n')
    assert find_source(elsewhere) == checkpoint
    expected = small_decoder("llama").state_dict()
    for name, weight in load_file(tmp_path / "wide" / "model.safetensors").items():
        assert torch.equal(weight, expected[name])
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "empty", "wide"]


def test_the_tokenizer_comes_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = write_tokenizer(tmp_path / "words", ["a", "b"])
    run_dir = store_alone(tmp_path / "run", config_of(tokenizer=str(tokenizer), end_token="</s>"))
    assert export(run_dir, tmp_path / "model") == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token == "</s>"
    tokenizer.unlink()
    capsys.readouterr()
    assert export(run_dir, tmp_path / "again") == 2
    assert str(tokenizer) in capsys.readouterr().err and not (tmp_path / "again").exists()


def test_what_the_run_began_from_must_still_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(config_of(), model=ModelConfig(path=str(tmp_path / "gone")))
    run_dir = store_alone(tmp_path / "run", config)
    assert export(run_dir, tmp_path / "model") == 2
    assert f"model.path = {tmp_path / 'gone'}" in capsys.readouterr().err


def test_large_weights_are_in_several_files(run_dir: Path, tmp_path: Path) -> None:
    stored = read_checkpoint(checkpoint_path(run_dir / "checkpoints", 3))
    assert export_model(stored, tmp_path / "model", max_file_bytes=20_000).num_files > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    for name, weight in small_decoder("llama").state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.bfloat16()), name


def test_what_cannot_be_exported_is_one_line(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(*words: object) -> str:
        assert export(*words) == 2
        return capsys.readouterr().err.removeprefix("bytescale: ").rstrip()

    target = tmp_path / "target"
    (tmp_path / "run" / "model").mkdir(parents=True)
    assert refusal(tmp_path / "nowhere", target) == f"{tmp_path / 'nowhere'} does not exist"
    assert refusal(tmp_path / "run", target).startswith(f"{tmp_path / 'run'} is no checkpoint and holds none; set ")
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    assert refusal(tmp_path / "run", target).endswith(f"the model that it trained is {tmp_path / 'run' / 'model'}")
    assert refusal(run_dir, tmp_path / "run") == f"{tmp_path / 'run'} exists; give a directory that does not"
    damaged = tmp_path / "step-000003"
    damaged.mkdir()
    for file in checkpoint_path(run_dir / "checkpoints", 3).iterdir():
        data = bytearray(file.read_bytes())
        data[-1] ^= file.suffix == ".safetensors"
        (damaged / file.name).write_bytes(data)
    assert "is damaged: its checksum differs" in refusal(damaged, target)
    assert not target.exists()
