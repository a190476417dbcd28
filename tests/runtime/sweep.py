"""Every decoder architecture of the installed Transformers at tiny sizes: refused by which line, or trained right.

`python -m tests.runtime.sweep` writes docs/models.md. What is accepted trains one step on two ranks that share a
sequence and, where it can be cut, on two stages; gradients are compared with plain Hugging Face in one process.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from bytescale.config.schema import ModelConfig
from bytescale.errors import UserError
from bytescale.plan.step_plan import StepPlan
from bytescale.runtime.model.decoder import build_decoder
from bytescale.runtime.model.hf_config import load_model_config
from bytescale.runtime.model.probe import probe
from bytescale.runtime.tensor_parallel.plan import check_sizes
from bytescale.runtime.tensor_parallel.probe import probe_split
from tests.plans import placed
from tests.ranks import RankPool, Ranks
from tests.runtime.models import even_stages, reference_of, step_of

PAGE = Path("docs/models.md")
CONTEXT = 512
BOUND = 2e-4
"""Largest error of a gradient over its largest entry, in fp32."""

TWO_RANKS = placed([40, 21], [[(0, 0), (1, 0)], [(1, 1)]], 2)
TWO_SEQUENCES = placed([40, 21], [[(0, 0)], [(0, 1)]], 1)
TWO_STAGES = placed([40, 21], [[(0, 0)], [(0, 1)]], 1, pp_size=2)

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "sliding_window": 4096,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "tie_word_embeddings": False,
}
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
_BLT = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "sarvam_mla"], _LATENT),
    "youtu": _LATENT,
    "blt": {f"{part}_config": _BLT for part in ("encoder", "decoder", "patcher", "global")}
    | {"encoder_hash_byte_group_vocab": 100},
    "cwm": {"bos_token_id": 1},
    "gemma3n_text": {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8},
    "gemma4_text": {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8},
    "granite": {"embedding_multiplier": 12.0},
    "granitemoe": {"embedding_multiplier": 12.0},
    "granitemoeshared": {"embedding_multiplier": 12.0},
    "hyperclovax": {"embedding_multiplier": 10.0},
    "modernbert-decoder": {"pad_token_id": 0, "bos_token_id": 1},
    "phi4_multimodal": {
        "vision_config": {**_TOWER, "num_hidden_layers": 1},
        "audio_config": {**_TOWER, "num_blocks": 1},
    },
    "zaya": {"num_experts_per_tok": 1},
}


@dataclass(frozen=True)
class Verdict:
    """What became of one architecture: the line that refused it, whole, in stages or split; or errors of gradients."""

    name: str
    refusal: str = ""
    no_stages: str = ""
    no_split: str = ""
    ranks_error: float | None = None
    stages_error: float | None = None
    split_error: float | None = None


def architectures() -> list[str]:
    return sorted({config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING})


def tiny(name: str) -> ModelConfig:
    """The architecture's smallest useful table, without what draws random numbers."""
    table: dict[str, Any] = {"model_type": name}
    with suppress(Exception):
        default = AutoConfig.for_model(name)
        own = default.to_dict()
        known = set(own) | set(getattr(default, "attribute_map", {})) | {"head_dim"}
        table |= {key: value for key, value in SIZES.items() if key in known}
        table |= {k: 0.0 for k, v in own.items() if re.search("drop|jitter|noise", k) and type(v) in (int, float)}
    return ModelConfig(config=table | OWN.get(name, {}))


def built(name: str) -> Any:
    model = tiny(name)
    return build_decoder(model, load_model_config(model, CONTEXT), 0).train()


def judge(name: str) -> Verdict:
    """Refused by which line, in one process."""
    try:
        decoder = built(name)
        probe(decoder, CONTEXT)
    except UserError as error:
        return Verdict(name, refusal=str(error))
    no_stages = no_split = ""
    try:
        probe(decoder, CONTEXT, even_stages(decoder, 2))
    except UserError as error:
        no_stages = str(error)
    try:
        check_sizes(decoder.config, 2)
        probe_split(decoder, CONTEXT, 2)
    except UserError as error:
        no_split = str(error)
    return Verdict(name, no_stages=no_stages, no_split=no_split)


def _error(ranks: Ranks, name: str, plan: StepPlan, tp_size: int = 1) -> float:
    """The largest error of a gradient on this rank, over the gradient's largest entry."""
    _, expected = reference_of(plan, built(name))
    _, found, _ = step_of(ranks, plan, built(name), tp_size=tp_size)
    return max(float((g - expected[k]).abs().max() / expected[k].abs().max().clamp_min(1e-4)) for k, g in found.items())


def sweep(pool: RankPool, names: Sequence[str]) -> list[Verdict]:
    """All verdicts, in order."""
    return [_measured(pool, judge(name)) for name in names]


def _measured(pool: RankPool, verdict: Verdict) -> Verdict:
    """`verdict` with the errors of what is accepted; a step that fails has an infinite one and hides no other model."""
    if verdict.refusal:
        return verdict
    by_ranks = _largest(pool, verdict.name, TWO_RANKS)
    by_stages = None if verdict.no_stages else _largest(pool, verdict.name, TWO_STAGES)
    by_split = None if verdict.no_split else _largest(pool, verdict.name, TWO_SEQUENCES, 2)
    return replace(verdict, ranks_error=by_ranks, stages_error=by_stages, split_error=by_split)


def _largest(pool: RankPool, name: str, plan: StepPlan, tp_size: int = 1) -> float:
    try:
        return max(pool.run(2, _error, name, plan, tp_size))
    except AssertionError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return float("inf")


def page(verdicts: Sequence[Verdict]) -> Iterator[str]:
    accepted = [v for v in verdicts if not v.refusal]
    yield from (
        "# Models",
        "",
        f"Every decoder architecture of Transformers {transformers.__version__} at tiny sizes, dropout off: "
        f"{len(accepted)} of {len(verdicts)} are trained, the",
        "others refused by the line shown. Written by `python -m tests.runtime.sweep`; the suite holds it to be true.",
        "",
        "The columns compare one training step with plain Hugging Face in one process, each sequence alone: two ranks",
        "that share a sequence, two pipeline stages, and two ranks of tensor parallelism. Figures are the largest",
        "error of any gradient over the gradient's largest entry, in fp32.",
        "",
        "## Trained",
        "",
        "| architecture | two ranks | two stages | two TP ranks |",
        "| --- | --- | --- | --- |",
    )
    for v in accepted:
        stages = f"{v.stages_error:.0e}" if v.stages_error is not None else f"refused: {_reason(v, v.no_stages)}"
        split = f"{v.split_error:.0e}" if v.split_error is not None else f"refused: {_reason(v, v.no_split)}"
        yield f"| {v.name} | {v.ranks_error:.0e} | {stages} | {split} |"
    yield from ("", "## Refused", "", "| architecture | line |", "| --- | --- |")
    yield from (f"| {v.name} | {_reason(v, v.refusal)} |" for v in verdicts if v.refusal)


def _reason(verdict: Verdict, line: str) -> str:
    line = re.sub(rf"^model '{re.escape(verdict.name)}':? ?", "", line)
    return line.replace("|", "\\|")


def main() -> None:
    pool = RankPool()
    try:
        PAGE.write_text("\n".join(page(sweep(pool, sys.argv[1:] or architectures()))) + "\n")
    finally:
        pool.close()


if __name__ == "__main__":
    main()
