"""The saved model: what Transformers would save, in every layout, with the files that other programs need."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from bytescale.checkpoint.weights_file import WeightsFile, split_by_size
from bytescale.config.data import DataConfig
from bytescale.config.schema import BatchConfig, Config, ModelConfig, TrainConfig
from bytescale.config.tokenizer import own_tokenizer, settle_tokenizer
from bytescale.data import load_tokenizer
from bytescale.errors import UserError
from bytescale.runtime.device import TORCH_DTYPES
from bytescale.runtime.fsdp import shard_model
from bytescale.runtime.model.stages import layer_ranges, stage_model
from bytescale.train.prepare import model_and_tokenizer
from bytescale.train.saving.checkpoint import check_shared, save_model, saved_config
from bytescale.train.saving.side_files import write_side_files
from tests.ranks import RankPool, Ranks
from tests.runtime.models import UNEVEN, small_decoder, world_of

SAVED: tuple[tuple[str, int, int, str, bool, int, dict[str, Any]], ...] = (
    ("llama", 1, 2, "float32", False, 10**9, {}),
    ("llama", 1, 2, "bfloat16", True, 10**9, {}),
    ("llama", 2, 2, "bfloat16", False, 10**9, {}),
    ("llama", 2, 2, "float32", True, 20_000, {}),
    # Sharded as columns.
    ("llama", 2, 2, "float32", True, 10**9, UNEVEN),
    # Experts are stored one by one, held as one tensor; three ranks shard it as a column.
    ("mixtral", 2, 2, "float32", False, 10**9, {}),
    ("mixtral", 1, 3, "bfloat16", False, 10**9, {}),
)


def config_of(model: ModelConfig | None = None, dtype: str = "float32", **data: Any) -> Config:
    return settle_tokenizer(
        Config(
            model=model or ModelConfig(config={}),
            data=DataConfig(source="python-stdlib", **data),
            batch=BatchConfig(tokens=1),
            train=TrainConfig(dtype=dtype),  # type: ignore[arg-type]
        )
    )


def _save(
    ranks: Ranks, architecture: str, pp_size: int, dtype: str, max_file_bytes: int, extra: dict[str, Any], target: Path
) -> int:
    """Save the model that seed 0 gives; returns how many elements the gathering kept alive at most on this rank."""
    decoder = small_decoder(architecture, **extra)
    model_config, world = decoder.config, world_of(ranks, pp_size=pp_size)
    stages = layer_ranges([1, 1] if pp_size == 2 else [2])
    model = stage_model(decoder, stages, world.stage)
    shard_model(model, world, TORCH_DTYPES[dtype])
    config = config_of(dtype=dtype)
    prepared: Any = SimpleNamespace(model_config=model_config, stages=stages, tokenizer=load_tokenizer(config.data))
    live: list[int] = []
    whole = torch.distributed.tensor.DTensor.full_tensor
    alive: list[Any] = []

    def full_tensor(self: Any, **options: Any) -> torch.Tensor:
        import weakref

        result = whole(self, **options)
        alive.append(weakref.ref(result))
        live.append(sum(t().numel() for t in alive if t() is not None))
        return result

    torch.distributed.tensor.DTensor.full_tensor = full_tensor  # type: ignore[method-assign]
    try:
        save_model(model, prepared, target, config, world, max_file_bytes)
    finally:
        torch.distributed.tensor.DTensor.full_tensor = whole  # type: ignore[method-assign]
    return max(live)


@pytest.mark.parametrize(("architecture", "pp_size", "hdp_size", "dtype", "tied", "max_file_bytes", "sizes"), SAVED)
def test_the_saved_model_is_what_transformers_would_save(
    ranks: RankPool,
    tmp_path: Path,
    architecture: str,
    pp_size: int,
    hdp_size: int,
    dtype: str,
    tied: bool,
    max_file_bytes: int,
    sizes: dict[str, Any],
) -> None:
    target = tmp_path / "model"
    extra = {"tie_word_embeddings": tied, **sizes}
    most_kept = ranks.run(hdp_size * pp_size, _save, architecture, pp_size, dtype, max_file_bytes, extra, target)
    theirs = tmp_path / "theirs"
    decoder = small_decoder(architecture, **extra).to(TORCH_DTYPES[dtype])
    decoder.save_pretrained(theirs)

    files = {name: file for file in target.glob("*.safetensors") for name in load_file(file)}
    weights = {name: load_file(file)[name] for name, file in files.items()}
    expected = load_file(theirs / "model.safetensors")
    assert sorted(weights) == sorted(expected) and ("lm_head.weight" in weights) == (not tied)
    for name, weight in expected.items():
        assert weights[name].dtype == weight.dtype and torch.equal(weights[name], weight), name
    index = target / "model.safetensors.index.json"
    assert index.exists() == (len(set(files.values())) > 1) == (pp_size == 2)
    if index.exists():
        stored = json.loads(index.read_text())
        assert stored["weight_map"] == {name: file.name for name, file in files.items()}
        assert stored["metadata"]["total_size"] == sum(w.nbytes for w in expected.values())
    ours, wanted = (json.loads((d / "config.json").read_text()) for d in (target, theirs))
    assert ours.pop("bytescale_tokenizer") == "byte"
    assert ours == wanted and ours["dtype"] == dtype and ours["tie_word_embeddings"] == tied

    loaded, reference = (AutoModelForCausalLM.from_pretrained(d, dtype="auto") for d in (target, theirs))
    ids = torch.arange(12)[None]
    for a, b in zip(loaded.state_dict().items(), decoder.state_dict().items(), strict=True):
        assert a[0] == b[0] and torch.equal(a[1], b[1]), a[0]
    assert torch.equal(loaded(ids, labels=ids).loss, reference(ids, labels=ids).loss)
    # No rank ever holds more than a small part of the model, the writers included.
    largest = max(p.numel() for p in decoder.parameters()) * (2 if architecture == "mixtral" else 1)
    assert max(most_kept) <= largest + 32 * 97


def _look(ranks: Ranks, run_dir: Path) -> str:
    """Rank 1, the second stage, sees another directory, as on a host of its own."""
    try:
        check_shared(run_dir / str(ranks.rank), world_of(ranks, pp_size=2), patience_s=0.1)
    except UserError as error:
        return str(error)
    return ""


def test_a_stage_that_does_not_see_the_run_directory_says_so_at_the_start(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "processes.json").touch()
    first, second = ranks.run(2, _look, tmp_path)
    assert first == "" and second.startswith(f"stage 1 does not see {tmp_path}/1; with a pipeline run.dir must be on")


def test_files_of_weights_are_read_by_the_library(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "half": torch.randn(5, 3).to(torch.bfloat16),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
        "steps": torch.arange(7),
        "turned": torch.randn(4, 6).T,
    }
    specs = [(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    with WeightsFile(tmp_path / "w.safetensors", specs) as file:
        for name in sorted(tensors):
            file.put(name, tensors[name])
    with safe_open(tmp_path / "w.safetensors", "pt") as stored:
        assert stored.metadata() == {"format": "pt"}
        assert all(torch.equal(stored.get_tensor(name), tensor) for name, tensor in tensors.items())


def test_files_are_split_by_size() -> None:
    specs = [(str(n), torch.float32, (n,)) for n in (1, 2, 30, 1, 1, 9)]
    assert [[spec[2][0] for spec in part] for part in split_by_size(specs, 40)] == [[1, 2], [30], [1, 1], [9]]
    assert split_by_size([], 40) == []


SPECIAL = ["<s>", "</s>", "<|eot|>", "<unk>"]


def write_tokenizer(path: Path, words: list[str]) -> Path:
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


def write_checkpoint(directory: Path) -> Path:
    """A checkpoint with the side files of a snapshot of the hub."""
    small_decoder("llama", bos_token_id=0, eos_token_id=1, pad_token_id=0).save_pretrained(directory)
    write_tokenizer(directory / "tokenizer.json", ["a", "b"])
    texts = {
        "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}),
        "generation_config.json": json.dumps({"bos_token_id": 0, "eos_token_id": [1, 2], "temperature": 0.6}),
        **{name: "{}" if name.endswith(".json") else name for name in CARRIED},
        **{name: name for name in NOT_CARRIED},
    }
    for name, text in texts.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


OF_THE_TOKENIZER = ("chat_template.jinja", "additional_chat_templates/tools.jinja", "merges.txt", "added_tokens.json")
OTHERS = ("README.md", "LICENSE", "preprocessor_config.json", "params.json")
CARRIED = (*OF_THE_TOKENIZER, *OTHERS)
NOT_CARRIED = (
    *(
        "modeling_my.py",
        "pytorch_model.bin",
        "optimizer.pt",
        "training_args.bin",
        "trainer_state.json",
        "rng_state_0.pth",
    ),
    *(".gitattributes", "original/consolidated.00.pth", "checkpoint-5/config.json", "pytorch_model.bin.index.json"),
)


def side_files(directory: Path, config: Config) -> tuple[Path, dict[str, Any]]:
    """The directory with everything but weights that a model of `config` is saved with, and its configuration."""
    model_config, tokenizer = model_and_tokenizer(config, 64)
    directory.mkdir()
    model: Any = SimpleNamespace(decoder=None, is_tied=False)
    stored = saved_config(model, model_config, tokenizer, config)
    stored.architectures = ["LlamaForCausalLM"]
    stored.save_pretrained(directory)
    write_side_files(directory, config, stored, tokenizer)
    return directory, json.loads((directory / "config.json").read_text())


def names_in(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


WRITTEN = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


def test_a_checkpoint_keeps_what_it_came_with(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    # A snapshot of the hub is made of links.
    (checkpoint / "LICENSE").rename(tmp_path / "blob")
    (checkpoint / "LICENSE").symlink_to(tmp_path / "blob")
    config = config_of(ModelConfig(path=str(checkpoint)))
    assert config.data.tokenizer == f"{checkpoint}/tokenizer.json"
    model, stored = side_files(tmp_path / "model", config)
    assert names_in(model) == {*WRITTEN, *CARRIED}
    for name in (*CARRIED, "tokenizer.json", "generation_config.json", "tokenizer_config.json"):
        assert json_or_text(model / name) == json_or_text(checkpoint / name), name
    assert (stored["bos_token_id"], stored["eos_token_id"], stored["pad_token_id"]) == (0, 1, 0)
    templates = AutoTokenizer.from_pretrained(model).chat_template
    assert templates == {"default": "chat_template.jinja", "tools": "additional_chat_templates/tools.jinja"}
    assert GenerationConfig.from_pretrained(model).eos_token_id == [1, 2]


def json_or_text(path: Path) -> Any:
    text = path.read_text()
    try:
        return json.loads(text)
    except ValueError:
        return text


def test_another_end_token_stops_generation_too(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    config = config_of(ModelConfig(path=str(checkpoint)), end_token="<unk>")
    model, _ = side_files(tmp_path / "model", config)
    assert json.loads((model / "generation_config.json").read_text())["eos_token_id"] == [1, 2, 3]
    assert AutoTokenizer.from_pretrained(model).eos_token_id == 3


@pytest.mark.parametrize("name", ["tokenizer.json", "mine.json"])
def test_the_tokenizer_that_trained_is_saved(tmp_path: Path, name: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    trained = write_tokenizer(tmp_path / "tok" / name, ["c", "d", "e"])
    for other in ("tokenizer_config.json", "chat_template.jinja", "config.json"):
        (trained.parent / other).write_text('{"eos_token": "<|eot|>"}')
    if name != "tokenizer.json":
        write_tokenizer(tmp_path / "tok" / "tokenizer.json", ["x"])
    config = config_of(ModelConfig(path=str(checkpoint)), tokenizer=str(trained))
    model, stored = side_files(tmp_path / "model", config)
    assert (model / "tokenizer.json").read_bytes() == trained.read_bytes()
    template = {"chat_template.jinja"} if name == "tokenizer.json" else set()
    assert names_in(model) == {*WRITTEN, *OTHERS, *template}
    end_id = load_tokenizer(config.data).end_id
    assert (stored["bos_token_id"], stored["eos_token_id"], stored["pad_token_id"]) == (None, end_id, None)
    generation = json.loads((model / "generation_config.json").read_text())
    assert generation == {"temperature": 0.6, "eos_token_id": end_id}


def test_bytes_leave_no_tokenizer_and_say_so(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    sizes = json.loads((checkpoint / "config.json").read_text()) | {"vocab_size": 300}
    (checkpoint / "config.json").write_text(json.dumps(sizes))
    model, stored = side_files(tmp_path / "model", config_of(ModelConfig(path=str(checkpoint)), tokenizer="byte"))
    assert names_in(model) == {"config.json", "generation_config.json", *OTHERS}
    assert (stored["bytescale_tokenizer"], stored["eos_token_id"]) == ("byte", 256)
    assert own_tokenizer(model) == "byte"
    # Trained on with a file, it is bytes no longer.
    (model / "model.safetensors").touch()
    trained = write_tokenizer(tmp_path / "tokenizer.json", ["c"])
    config = config_of(ModelConfig(path=str(model)), tokenizer=str(trained))
    _, stored = side_files(tmp_path / "next", config)
    assert "bytescale_tokenizer" not in stored


def test_a_tokenizer_file_alone_loads_with_its_special_tokens(tmp_path: Path) -> None:
    trained = write_tokenizer(tmp_path / "tok" / "tokenizer.json", ["c", "d", "e"])
    config = config_of(ModelConfig(preset="llama-tiny"), tokenizer=str(trained))
    model, stored = side_files(tmp_path / "model", config)
    # A preset takes the vocabulary of the file.
    assert stored["vocab_size"] == 7 and stored["eos_token_id"] == 1
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.unk_token) == ("</s>", "<s>", "<unk>")
    assert tokenizer.encode("c e", add_special_tokens=False) == [4, 6]
    assert names_in(model) == WRITTEN


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    os.unlink(checkpoint / "tokenizer.json")
    with pytest.raises(
        UserError, match=r"brings no tokenizer\.json; set data\.tokenizer to the tokenizer that trained"
    ):
        model_and_tokenizer(config_of(ModelConfig(path=str(checkpoint))), 64)


def test_numbers_of_the_vocabulary_keep_their_preset_with_bytes() -> None:
    model_config, tokenizer = model_and_tokenizer(config_of(ModelConfig(preset="llama-125m")), 64)
    assert (model_config.vocab_size, tokenizer.vocab_size, np.uint16(tokenizer.end_id)) == (32000, 257, 256)
