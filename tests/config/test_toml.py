"""Configuration files and overrides: what is read, what is refused and in which words."""

import ast
import inspect
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescale.config.overrides import parse_overrides
from bytescale.config.schema import Config
from bytescale.config.tokenizer import is_own
from bytescale.config.toml import config_keys, load_config, write_config
from bytescale.data.sources.source import open_source
from bytescale.errors import UserError

MINIMAL = """
[model]
preset = "tiny"
[data]
source = "python-stdlib"
[batch]
tokens = 4096
"""


def load(tmp_path: Path, text: str = MINIMAL, arguments: str | list[str] = "") -> Config:
    path = tmp_path / "run.toml"
    path.write_text(text)
    words = arguments.split() if isinstance(arguments, str) else arguments
    overrides, rest = parse_overrides(words)
    assert rest == []
    return load_config(path, overrides)


def refusal(tmp_path: Path, text: str = MINIMAL, arguments: str | list[str] = "") -> str:
    with pytest.raises(UserError) as caught:
        load(tmp_path, text, arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_list_of_keys_changes_on_purpose_only() -> None:
    assert config_keys() == [
        *("model.preset", "model.path", "model.config"),
        *("data.source", "data.path", "data.glob", "data.text_field", "data.content", "data.messages_field"),
        *("data.loss", "data.chat_template", "data.tokens_field", "data.labels_field", "data.mask_field"),
        "data.sources",
        *("data.sources.name", "data.sources.weight", "data.sources.epochs", "data.mix"),
        *("data.tokenizer", "data.end_token"),
        *(
            "data.begin_token",
            "data.max_context",
            "data.overlong",
            "data.split_at",
            "data.validation",
            "data.on_error",
            "data.workers",
            "data.cache_dir",
        ),
        *("batch.tokens", "batch.sequences"),
        *(
            "parallel.pp_size",
            "parallel.tp_size",
            "parallel.expert_parallel",
            "parallel.hdp_size",
            "parallel.shard_size",
        ),
        *("plan.strategy", "plan.tokens_per_rank", "plan.offload", "plan.offload_cap", "plan.profile"),
        *("offload.dir", "offload.limit_bytes", "offload.min_bytes"),
        *("train.steps", "train.lr", "train.min_lr_ratio", "train.warmup_steps", "train.weight_decay"),
        *("train.beta1", "train.beta2", "train.grad_clip", "train.device", "train.dtype"),
        *("train.activation_checkpointing", "train.seed", "train.compute_threads", "train.on_nonfinite"),
        "train.max_skipped_steps",
        *("eval.every", "eval.source", "eval.path", "eval.tokens", "eval.sequences"),
        *("checkpoint.every", "checkpoint.keep", "checkpoint.dir", "checkpoint.async", "checkpoint.resume"),
        *("run.dir", "run.overwrite", "run.save_model", "run.writers", "run.comm_timeout_s"),
    ]


def field_texts() -> dict[str, str]:
    """`section.key` -> the words under its field in the schema."""
    sections = {kind.__name__: name for name, kind in get_type_hints(Config).items()}
    sections |= {"DocumentsConfig": "data", "SourceConfig": "data.sources"}
    texts = {}
    files = {Path(inspect.getfile(kind)) for kind in get_type_hints(Config).values()}
    for node in (node for file in files for node in ast.parse(file.read_text()).body):
        if isinstance(node, ast.ClassDef) and node.name in sections:
            for declared, below in pairwise(node.body):
                if isinstance(declared, ast.AnnAssign) and isinstance(below, ast.Expr):
                    key = f"{sections[node.name]}.{declared.target.id.removesuffix('_')}"  # type: ignore[union-attr]
                    texts[key] = " ".join(below.value.value.split())  # type: ignore[attr-defined]
    return texts


def test_every_key_is_documented_in_the_words_of_the_schema() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    texts = field_texts()
    assert sorted(texts) == sorted(config_keys())
    wrong = {key: texts[key] for key in config_keys() if not rows.get(key, "").endswith(f"| {texts[key]} |")}
    assert wrong == {}, "the last column of docs/configuration.md differs from these words"


def test_the_quickstart_is_sound() -> None:
    config = load_config(Path(__file__).parents[2] / "configs" / "quickstart.toml")
    assert (config.data.max_context, config.plan.tokens_per_rank, config.data.overlong) == (16384, 4096, "split")
    assert Path(config.run.dir) == Path.cwd() / "runs/quickstart"


def test_defaults_and_types(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL + "[train]\nlr = 1\n[plan]\noffload = 0\n[parallel]\nhdp_size = 4\n")
    assert config.train.lr == 1.0 and isinstance(config.train.lr, float)
    assert config.plan.offload == 0.0 and isinstance(config.plan.offload, float)
    assert config.parallel.hdp_size == 4
    assert Path(config.run.dir) == Path.cwd() / "runs/default"


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ("--train.steps 7", "train.steps", 7),
        ("--train.steps=7", "train.steps", 7),
        ("--train.steps 7 --train.steps 8", "train.steps", 8),
        ("--plan.tokens-per-rank 1_024", "plan.tokens_per_rank", 1024),
        ("--plan.tokens_per_rank 1024", "plan.tokens_per_rank", 1024),
        ("--train.lr 3e-4", "train.lr", 3e-4),
        ("--train.lr 1", "train.lr", 1.0),
        ("--run.save-model false", "run.save_model", False),
        ("--run.save_model", "run.save_model", True),
        ("--plan.offload off", "plan.offload", "off"),
        ("--plan.offload 0.25", "plan.offload", 0.25),
        ("--data.glob 2024", "data.glob", "2024"),
        ("--data.glob true", "data.glob", "true"),
        ("--data.glob=a=b", "data.glob", "a=b"),
        (["--data.glob", '"quoted name"'], "data.glob", "quoted name"),
        (["--data.glob", "two words"], "data.glob", "two words"),
        ("--run.dir 2024", "run.dir", str(Path.cwd() / "2024")),
        ("--run.dir ./a/../b", "run.dir", str(Path.cwd() / "a/../b")),
        ("--run.dir /x", "run.dir", "/x"),
        ("--data.tokenizer byte", "data.tokenizer", "byte"),
        ("--data.tokenizer ./byte", "data.tokenizer", str(Path.cwd() / "byte")),
        ("--data.max_context 32K", "data.max_context", 32768),
        ("--batch.tokens 1.5M", "batch.tokens", 3 << 19),
        ("--plan.tokens-per-rank=8k", "plan.tokens_per_rank", 8192),
        ("--offload.limit_bytes 20MiB", "offload.limit_bytes", 20 << 20),
        (["--offload.limit_bytes", "20 MB"], "offload.limit_bytes", 20_000_000),
        ("--run.writers tensorboard", "run.writers", ("tensorboard",)),
        ("--run.writers tensorboard,wandb", "run.writers", ("tensorboard", "wandb")),
        (["--run.writers", '["wandb"]'], "run.writers", ("wandb",)),
        (["--run.writers", "[]"], "run.writers", ()),
        ("--run.comm_timeout_s 2min", "run.comm_timeout_s", 120.0),
        (["--run.comm_timeout_s", '"1.5 h"'], "run.comm_timeout_s", 5400.0),
        ("--data.source text-tree --data.path /x", "data.source", "text-tree"),
        ("--model.config.hidden_size 64", "model.config", {"hidden_size": 64}),
        ("--model.config.hidden-act silu", "model.config", {"hidden_act": "silu"}),
        ("--model.config.rope_parameters.rope_theta 1e5", "model.config", {"rope_parameters": {"rope_theta": 1e5}}),
        (["--model.config", '{model_type = "llama"}'], "model.config", {"model_type": "llama"}),
        (["--model.config.layer_types", '["a", "b"]'], "model.config", {"layer_types": ["a", "b"]}),
        ("--model.config.tie_word_embeddings", "model.config", {"tie_word_embeddings": True}),
        ("--batch.sequences 12", "batch.sequences", 12),
    ],
)
def test_overrides(tmp_path: Path, arguments: str | list[str], key: str, value: Any) -> None:
    section, name = key.split(".")
    got = getattr(getattr(load(tmp_path, MINIMAL, arguments), section), name)
    assert got == value and type(got) is type(value)


def test_nested_overrides_merge_into_the_files_table(tmp_path: Path) -> None:
    text = MINIMAL.replace('preset = "tiny"', "config = {hidden_size = 32, num_hidden_layers = 2}")
    config = load(tmp_path, text, "--model.config.hidden_size 64 --model.config.vocab_size 300")
    assert config.model.config == {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--model.path /m", (None, "/m", None)),
        ("--model.config.x 1", (None, None, {"x": 1})),
        ("--model.path /m --model.preset other", ("other", None, None)),
        ("--model.config.x 1 --model.path /m --model.config.y 2", (None, None, {"y": 2})),
    ],
)
def test_the_last_choice_of_a_model_wins(tmp_path: Path, arguments: str, expected: tuple[Any, Any, Any]) -> None:
    model = load(tmp_path, MINIMAL, arguments).model
    assert (model.preset, model.path, model.config) == expected


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        (MINIMAL + "[trian]\nsteps = 1", "", "unknown section [trian]; did you mean 'train'?"),
        (MINIMAL + "[train]\nstpes = 1", "", "unknown key train.stpes; did you mean 'steps'?"),
        (MINIMAL + "[train]\ntokens_per_rank = 1", "", "there is plan.tokens_per_rank"),
        (MINIMAL + '[train]\nsteps = "ten"', "", 'train.steps must be an integer, not the string "ten"'),
        (MINIMAL + "[train]\nsteps = 2.0", "", "train.steps must be an integer, not the number 2.0"),
        (MINIMAL + "[train]\nsteps = true", "", "train.steps must be an integer, not true"),
        (MINIMAL + "[train]\nlr = [1]", "", "train.lr must be a finite number, not an array"),
        (MINIMAL + "[train]\nlr = nan", "", "train.lr must be a finite number, not the number nan"),
        (MINIMAL + "[run]\ndir = 3", "", "run.dir must be a string, not the integer 3"),
        (MINIMAL + "[run]\nsave_model = 1", "", "run.save_model must be true or false, not the integer 1"),
        (MINIMAL + "[plan]\noffload = true", "", "plan.offload must be a string or a finite number, not true"),
        (MINIMAL + "[plan]\nstrategy = {a = 1}", "", "plan.strategy must be a string, not a table"),
        ("train = 3\n" + MINIMAL, "", "train is a section of its own: write [train]"),
        ("seed = 3\n" + MINIMAL, "", "unknown section [seed]"),
        (MINIMAL.replace('source = "python-stdlib"', ""), "", "data.source is missing; choose one of text-tree"),
        (MINIMAL.replace("python-stdlib", "web"), "", "data.source = 'web' is unknown"),
        (MINIMAL.replace("tokens = 4096", ""), "", "[batch] needs exactly one of tokens and sequences"),
        (MINIMAL.replace('preset = "tiny"', ""), "", "[model] needs exactly one of preset, path, config"),
        (MINIMAL.replace('preset = "tiny"', 'preset = "a"\npath = "b"'), "", "given: preset, path"),
        ("[model]\npreset = \n", "", "is not valid TOML: Invalid value (at line 2"),
        ("[model]\npreset = [1,\n\n", "", "is not valid TOML: Invalid value (at the end, line 3)"),
        ("[model]\n[model]\n", "", "line 2"),
        (MINIMAL, "--trian.steps 3", "unknown section in --trian.steps; did you mean 'train'?"),
        (MINIMAL, "--train.stpes 3", "unknown key train.stpes; did you mean 'steps'?"),
        (MINIMAL, "--train.steps 1.5", "train.steps must be an integer, not the number 1.5"),
        (MINIMAL, "--train.steps", "--train.steps needs a value: an integer"),
        (MINIMAL, "--train.steps --train.lr 1", "--train.steps needs a value"),
        (MINIMAL, "--train.steps 0", "train.steps = 0; it must be at least 1"),
        (MINIMAL, "--train.steps.more 1", "--train.steps.more: train.steps is not a table"),
        (MINIMAL, "--model.config.a 1 --model.config.a.b 2", "--model.config.a.b: a is not a table but the integer 1"),
        (MINIMAL, "--run.save_model maybe", 'run.save_model must be true or false, not the string "maybe"'),
        (MINIMAL, "--steps 3", "unknown option --steps; a configuration key is written --section.key value"),
        (MINIMAL, "--train. 3", "unknown option --train."),
        (MINIMAL, "--run.dir=", "run.dir is empty; leave it out or give a value"),
        (MINIMAL + '[run]\ndir = "a\\u0000b"', "", "run.dir holds a null character"),
        (MINIMAL, f"--plan.tokens_per_rank {2**63}", "plan.tokens_per_rank = 9223372036854775808 does not fit in 64"),
        (
            MINIMAL,
            "--offload.limit_bytes 20MiBs",
            "offload.limit_bytes must be a number of bytes such as 65536, 64 KiB",
        ),
        (
            MINIMAL,
            "--batch.tokens 0.3K",
            "batch.tokens must be a number of tokens such as 8192, 32K or 2M, not the str",
        ),
        (MINIMAL, "--run.comm_timeout_s 20MiB", "run.comm_timeout_s must be a time such as 90, 90 s or 10 min"),
        (MINIMAL, f"--batch.tokens {10**12}G", "does not fit in 64 bits"),
        (MINIMAL, "--run.writers x", "run.writers = 'x' is unknown; choose one of tensorboard, wandb"),
        (MINIMAL, "--run.writers wandb,wandb", "run.writers names one twice: wandb, wandb"),
        (MINIMAL + "[run]\nwriters = 3", "", "run.writers must be a list of words, not the integer 3"),
        (MINIMAL + "[run]\nwriters = [3]", "", "run.writers must be a list of words, not an array"),
        (MINIMAL, "--train.compute_threads 0", "train.compute_threads = 0; it must be at least 1"),
        (MINIMAL, "--train.min_lr_ratio 1.5", "train.min_lr_ratio = 1.5; it lies in 0..1"),
        (MINIMAL, "--train.weight_decay -0.1", "train.weight_decay = -0.1; it must be at least 0"),
        (MINIMAL, "--train.lr 1e38", "train.lr = 1e+38; it must be above 0 and at most 1e+09"),
        (MINIMAL, "--train.beta1 1", "train.beta1 = 1.0; it must be at least 0 and below 1"),
        (MINIMAL, "--train.beta2 -0.1", "train.beta2 = -0.1; it must be at least 0 and below 1"),
        (MINIMAL, "--run.comm_timeout_s 1e300", "comm_timeout_s = 1e+300; it must be above 0 and at most 2592000"),
        (MINIMAL, ["--run.dir", "a\udcff"], "--run.dir: the value is not valid UTF-8"),
    ],
)
def test_refusals(tmp_path: Path, text: str, arguments: str | list[str], words: str) -> None:
    assert words in refusal(tmp_path, text, arguments)


def test_complaints_about_the_file_name_it(tmp_path: Path) -> None:
    assert refusal(tmp_path, MINIMAL + "[train]\nsteps = 0").startswith(f"{tmp_path / 'run.toml'}: train.steps = 0")


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read configuration .*none\.toml: No such file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(UserError, match=r"cannot read configuration .*: Is a directory"):
        load_config(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9")
    with pytest.raises(UserError, match="not UTF-8 text: byte 5"):
        load_config(tmp_path / "latin.toml")


def test_words_that_are_no_options_are_returned() -> None:
    overrides, rest = parse_overrides(["a.toml", "--train.lr", "-1e-3", "b", "--x.y=1"])
    assert rest == ["a.toml", "b"]
    assert [(override.option, override.text) for override in overrides] == [("--train.lr", "-1e-3"), ("--x.y", "1")]


PATH_KEYS = [
    "model.path",
    "data.path",
    "data.tokenizer",
    "data.cache_dir",
    "plan.profile",
    "offload.dir",
    "eval.path",
    "run.dir",
]


@pytest.mark.parametrize("key", PATH_KEYS)
def test_every_path_key_knows_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    section, name = key.split(".")
    monkeypatch.setenv("HOME", "/home/of/mine")
    assert getattr(getattr(load(tmp_path, MINIMAL, f"--{key} ~/a/b"), section), name) == "/home/of/mine/a/b"
    for home in ("", None):
        monkeypatch.setenv("HOME", home) if home is not None else monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
        words = refusal(tmp_path, MINIMAL, f"--{key} ~/a/b")
        assert words == f"{key} = ~/a/b: there is no home directory for ~; give an absolute path"
    assert f"{key} = ~nobody-of-that-name/a" in refusal(tmp_path, MINIMAL, f"--{key} ~nobody-of-that-name/a")


def test_a_stored_configuration_means_the_same_files_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "he[r]e", tmp_path / "there"
    here.mkdir(), there.mkdir()
    (here / "a.jsonl").touch(), (here / "[b].jsonl").touch()
    monkeypatch.chdir(here)
    for pattern, found in (("*.jsonl", ["[b].jsonl", "a.jsonl"]), ("[b].jsonl", ["[b].jsonl"])):
        config = load(tmp_path, MINIMAL.replace("python-stdlib", "jsonl"), f"--data.path {pattern} --run.dir r")
        write_config(config, there / "config.toml")
        monkeypatch.chdir(there)
        assert load_config(there / "config.toml") == config
        assert (Path(config.run.dir), list(open_source(config.data).files)) == (here / "r", found)
        monkeypatch.chdir(here)


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    (tmp_path / "run.toml").write_text(MINIMAL + '[run]\ndir = "/x"\n')
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert load_config(tmp_path / "run.toml").run.dir == "/x"
    with pytest.raises(UserError, match=r"run\.dir = x is relative, but the working directory is gone"):
        load_config(tmp_path / "run.toml", parse_overrides(["--run.dir", "x"])[0])


def checkpoint_of(directory: Path, tokenizer: str | None, config: str = "{}") -> str:
    directory.mkdir()
    (directory / "config.json").write_text(config)
    if tokenizer is not None:
        (directory / "tokenizer.json").write_text(tokenizer)
    return str(directory)


def test_the_tokenizer_is_what_is_stated_or_what_the_checkpoint_brings(tmp_path: Path) -> None:
    own = checkpoint_of(tmp_path / "own", "{}")
    twin = checkpoint_of(tmp_path / "twin", "{}")
    other = checkpoint_of(tmp_path / "other", "[]")
    none = checkpoint_of(tmp_path / "none", None)
    bytes_ = checkpoint_of(tmp_path / "bytes", None, '{"bytescale_tokenizer": "byte"}')
    for arguments, tokenizer, whether_own in (
        ([], "byte", False),
        (["--model.path", own], f"{own}/tokenizer.json", True),
        (["--model.path", own, "--data.tokenizer", twin], twin, True),
        (["--model.path", own, "--data.tokenizer", other], other, False),
        (["--model.path", own, "--data.tokenizer", "byte"], "byte", False),
        (["--model.path", none], None, False),
        (["--model.path", bytes_], "byte", True),
        (["--model.path", str(tmp_path / "absent")], None, False),
    ):
        config = load(tmp_path, MINIMAL, arguments)
        assert (config.data.tokenizer, is_own(config)) == (tokenizer, whether_own), arguments


TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
TOML_VALUES = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(
    table=st.dictionaries(TEXT, TOML_VALUES, max_size=5),
    directory=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20),
    lr=st.floats(1e-12, 1e3),
    offload=st.sampled_from(["auto", "off"]) | st.floats(0, 1),
    sizes=st.tuples(st.integers(1, 2**40), st.integers(1, 64) | st.none()),
)
def test_what_is_written_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory,
    table: dict[str, Any],
    directory: str,
    lr: float,
    offload: str | float,
    sizes: tuple[int, int | None],
) -> None:
    base = tmp_path_factory.getbasetemp()
    config = load(base)
    fields = {name: vars(getattr(config, name)) for name in vars(config)}
    changed = Config(
        model=type(config.model)(config=table),
        data=config.data,
        batch=type(config.batch)(tokens=sizes[0]),
        parallel=type(config.parallel)(hdp_size=sizes[1]),
        plan=type(config.plan)(**(fields["plan"] | {"offload": offload})),
        train=type(config.train)(**(fields["train"] | {"lr": lr})),
        run=type(config.run)(**(fields["run"] | {"dir": f"/{directory}"})),
    )
    path = base / "resolved.toml"
    with patch("os.fsync"):
        write_config(changed, path)
    assert load_config(path) == changed


@given(st.text(max_size=80))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(text, encoding="utf-8", errors="replace")
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


@given(st.sampled_from(config_keys()), st.text(max_size=20) | TOML_VALUES.map(str))
def test_any_override_is_applied_or_refused(tmp_path_factory: pytest.TempPathFactory, key: str, text: str) -> None:
    try:
        config = load(tmp_path_factory.getbasetemp(), MINIMAL, [f"--{key}={text}"])
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(config, Config)


MIXTURE = """
[model]
preset = "tiny"
[data]
mix = "sequences"
[[data.sources]]
source = "text-tree"
path = "./books"
weight = 3
epochs = 2
[[data.sources]]
name = "my-code"
source = "python-stdlib"
[batch]
tokens = 4096
"""


def test_a_mixture(tmp_path: Path) -> None:
    arguments = "--data.sources.my-code.weight 0.5 --data.sources.source-1.path x"
    config = load(tmp_path, MIXTURE, arguments)
    first, second = config.data.named_sources
    assert (first.name, first.weight, first.epochs, first.path) == ("source-1", 3.0, 2, str(Path.cwd() / "x"))
    assert (second.name, second.weight, second.source) == ("my-code", 0.5, "python-stdlib")
    write_config(config, tmp_path / "again.toml")
    assert load_config(tmp_path / "again.toml") == config
    # One source on the command line takes the place of all of them.
    assert load(tmp_path, MIXTURE, "--data.source python-stdlib").data.sources == ()


@pytest.mark.parametrize(
    ("change", "arguments", "words"),
    [
        (("weight = 3", "weight = -1"), "", "number 1: data.sources.weight = -1.0; it must be at least 0"),
        (("weight = 3", 'weight = "3"'), "", "number 1: data.sources.weight must be a finite number, not the string"),
        (("weight = 3", "wieght = 3"), "", "number 1: unknown key data.sources.wieght; did you mean 'weight'?"),
        (("epochs = 2", "epochs = 0"), "", "number 1: data.sources.epochs = 0; it must be at least 1"),
        (("weight = 3", "weight = 0"), "--data.sources.my_code.weight 0", "add up to 0; give at least one a weight"),
        (('path = "./books"', ""), "", 'number 1: data.sources.source = "text-tree" needs data.sources.path'),
        (('source = "python-stdlib"', ""), "", "number 2: data.sources.source is missing; choose one of text-tree"),
        (('name = "my-code"', 'name = "source-1"'), "", 'two [[data.sources]] are called "source-1"'),
        (("[data]", '[data]\npath = "x"'), "", "data.path is of one source, but there are [[data.sources]]"),
        (("", ""), "--data.sources.code.weight 2", "no source is called code; did you mean 'my_code'?"),
        (("", ""), "--data.sources.my-code.wait 2", "unknown key data.sources.wait; did you mean 'weight'?"),
        (("", ""), "--data.sources 2", "data.sources must be tables of their own, each opened by [[data.sources]]"),
    ],
)
def test_bad_mixtures(tmp_path: Path, change: tuple[str, str], arguments: str, words: str) -> None:
    assert words in refusal(tmp_path, MIXTURE.replace(*change), arguments)
