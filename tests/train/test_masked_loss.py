"""Loss and gradients over the assistant's tokens alone, on any ranks, equal those of a plain Transformers loop."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bytescale.config.data import DataConfig
from bytescale.config.schema import BatchConfig, Config
from bytescale.config.toml import load_config
from bytescale.data import StepLoader
from bytescale.runtime.attention.kernels import CpuKernel
from bytescale.runtime.fsdp import shard_model
from bytescale.runtime.model.decoder import build_decoder
from bytescale.train.prepare import prepare
from bytescale.train.step import run_step
from bytescale.train.trainer import build_model
from tests.data.corpora import write_jsonl
from tests.data.test_chat import TEMPLATES, by_transformers, messages, write_chat_tokenizer
from tests.ranks import RankPool, Ranks
from tests.runtime.models import whole_gradients, world_of
from tests.train.runs import write_run
from tests.train.test_parity import check_gradients, free_planner, with_options

pytestmark = pytest.mark.long


def conversations() -> list[list[tuple[str, str]]]:
    """Of one to four turns, some of them long, with long questions and short answers and the reverse."""
    rng = np.random.default_rng(3)
    words = ["the cat ", "sat on ", "a rat, ", "é ", "mat\n"]

    def text(size: int) -> str:
        return "".join(rng.choice(words, size)).strip() or "the"

    chats = []
    for number in range(14):
        turns = [("system", text(5))] if number % 3 == 0 else []
        for _ in range(1 + number % 4):
            turns += [("user", text(int(rng.integers(1, 60)))), ("assistant", text(int(rng.integers(1, 60))))]
        chats.append(turns)
    return chats


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    directory = tmp_path_factory.mktemp("masked")
    tokenizer = write_chat_tokenizer(directory / "t", TEMPLATES["chatml"])
    path = write_jsonl(directory / "chats.jsonl", [{"messages": messages(chat)} for chat in conversations()])
    data = DataConfig(
        source="jsonl", path=str(path), content="messages", tokenizer=str(tokenizer), max_context=4096,
        cache_dir=str(directory / "cache"),
    )  # fmt: skip
    plain = load_config(write_run(directory))
    model = replace(plain.model, config={**(plain.model.config or {}), "vocab_size": 400})
    return replace(plain, data=data, model=model, batch=BatchConfig(sequences=14))


def _masked_step(ranks: Ranks, config: Config, chunks: bool = False) -> tuple[float, list[dict[str, torch.Tensor]]]:
    """Loss sum of this rank and whole gradients after one step over all conversations."""
    prepared, world = prepare(config, ranks.size), world_of(ranks, pp_size=config.parallel.pp_size)
    planner = free_planner(config, world.hdp_size) if chunks else prepared.planner
    model = build_model(config, prepared, world.stage)
    shard_model(model, world, torch.float32)
    with StepLoader(prepared.dataset, config.batch, 0, planner, world.hdp_rank, num_steps=1) as loader:
        data = next(loader)
        assert chunks == (data.plan.layout == "chunks")
        result = run_step(model, CpuKernel(), world, data)
    return result.loss_sum, [whole_gradients(model)]


def by_plain_loop(config: Config, layers: int) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Loss sum, targets and mean gradients of Transformers on the same conversations, one after the other."""
    config = with_options(config, layers=layers, tokens_per_rank=1 << 20)
    model_config = prepare(config, 1).model_config
    model = AutoModelForCausalLM.from_config(deepcopy(model_config), attn_implementation="eager")
    model.load_state_dict(build_decoder(config.model, model_config, config.train.seed).state_dict())
    total, num_targets = torch.zeros(()), 0
    for ids, labels in by_transformers(Path(str(config.data.tokenizer)), conversations()):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
        row = torch.tensor(labels)
        total = total + torch.nn.functional.cross_entropy(logits, row, ignore_index=-100, reduction="sum")
        num_targets += int((row >= 0).sum())
    (total / num_targets).backward()
    gradients = {f"decoder.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(total.detach()), num_targets, gradients


CASES: list[dict[str, Any]] = [
    {"size": 1, "tokens_per_rank": 1 << 14},
    {"size": 3, "tokens_per_rank": 250, "strategy": "hdp-naive"},
    {"size": 3, "tokens_per_rank": 300, "strategy": "best"},
    {"size": 4, "tokens_per_rank": 350, "strategy": "hdp-balance", "pp_size": 2},
    {"size": 2, "tokens_per_rank": 500, "strategy": "chunked", "pp_size": 2},
]


def test_loss_and_gradients_equal_a_plain_loop(ranks: RankPool, config: Config) -> None:
    expected: dict[int, Any] = {layers: by_plain_loop(config, layers) for layers in (2, 5)}
    for case in CASES:
        options = dict(case)
        size, chunked = options.pop("size"), case.get("strategy") == "chunked"
        layers = 5 if chunked else 2
        loss, num_targets, gradients = expected[layers]
        found = ranks.run(size, _masked_step, with_options(config, layers=layers, **options), chunked)
        assert sum(loss_sum for loss_sum, _ in found) == pytest.approx(loss, rel=1e-5)
        check_gradients([rows for _, rows in found], [gradients])
        assert prepare(with_options(config, tokens_per_rank=1 << 20), 1).dataset.num_targets.sum() == num_targets
