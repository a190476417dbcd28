"""Named models and clusters: the six models of the ByteScale paper, four kinds of GPU, and two yardsticks.

Models. Layers, heads, KV groups and hidden size are the paper's table; it gives neither feed-forward widths nor
vocabularies, so the standard ones of these families stand here. LLaMA-30B is printed with 56 heads on a hidden size of
6656; heads of 128 are kept, so its query is wider than its hidden state.

Clusters. Figures are what kernels and links reach in practice, estimated from public peaks; none has been measured
here. Attention reaches half its speed at blocks of 256 tokens, 94 % at 4K; a ring step takes at least 100 us (a
transfer, the kernels of a block and the merge, each with its launch), which is what makes blocks under 2K tokens
expensive. Hosts are taken to have 2 TB for 8 GPUs.

`paper` is the paper's cluster: `resources/paper_cluster.toml` has its constants, each with its source, one set for all
models; three of them are fitted to the 96 speedups of Fig. 17. `dense_flops` counts s*(12h + s), h = 4096.
"""

import tomllib
from importlib import resources
from typing import Any

from bytescale.cost.model import ClusterSpec, CostModel, DirectionCost, Link, ModelShape, cost_model
from bytescale.errors import UserError, nearest

_MODELS = (
    ModelShape("llama-7b", 32, 4096, 32, 8, 128, 11008, 32000),
    ModelShape("llama-13b", 40, 5120, 40, 8, 128, 13824, 32000),
    ModelShape("llama-30b", 60, 6656, 56, 8, 128, 17920, 32000),
    ModelShape("llama-70b", 80, 8192, 64, 8, 128, 28672, 32000),
    ModelShape("mistral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, 8, 2),
    ModelShape("mistral-8x22b", 56, 6144, 48, 8, 128, 16384, 32768, 8, 2),
)
MODELS: dict[str, ModelShape] = {model.name: model for model in _MODELS}

_7B = MODELS["llama-7b"]


_HOST_BYTES = 250e9
"""A GPU's share of a host of 2 TB and eight GPUs."""


def _gpu(
    name: str,
    linear_tflops: float,
    attention_tflops: float,
    nvlink_gb: float,
    nic_gb: float,
    copy_gb: float,
    memory_gb: float,
) -> ClusterSpec:
    return ClusterSpec(
        name=name,
        gpus_per_node=8,
        linear_flops_per_s=linear_tflops * 1e12,
        attention_flops_per_s=attention_tflops * 1e12,
        block_half_tokens=256.0,
        ring_step_floor_s=100e-6,
        layer_overhead_s=30e-6,
        intra_node=Link(10e-6, nvlink_gb * 1e9),
        inter_node=Link(20e-6, nic_gb * 1e9),
        copy_bytes_per_s=copy_gb * 1e9,
        memory_bytes=memory_gb * 1e9,
        host_memory_bytes=_HOST_BYTES,
    )


def paper_constants() -> dict[str, dict[str, Any]]:
    """Constants of the paper's cluster: name -> value, unit and source."""
    return tomllib.loads(resources.files("bytescale.resources").joinpath("paper_cluster.toml").read_text("utf-8"))


def _paper_cluster(constants: dict[str, dict[str, Any]]) -> ClusterSpec:
    value = {name: float(entry["value"]) for name, entry in constants.items()}
    return ClusterSpec(
        name="paper",
        gpus_per_node=int(value["gpus_per_node"]),
        linear_flops_per_s=value["linear_tflops"] * 1e12,
        attention_flops_per_s=value["attention_tflops"] * 1e12,
        block_half_tokens=0.0,
        ring_step_floor_s=value["ring_step_floor_ms"] * 1e-3,
        layer_overhead_s=0.0,
        intra_node=Link(0.0, value["intra_node_gb_per_s"] * 1e9),
        inter_node=Link(value["inter_node_latency_ms"] * 1e-3, value["inter_node_gb_per_s"] * 1e9),
        copy_bytes_per_s=value["copy_gb_per_s"] * 1e9,
        memory_bytes=value["memory_gb"] * 1e9,
        host_memory_bytes=_HOST_BYTES,
        backward_linear=value["backward_linear"],
        backward_attention=value["backward_attention"],
        backward_transfer=value["backward_transfer"],
        count_head=False,
        provenance="fitted",
    )


_CLUSTERS = (
    _gpu("h100", linear_tflops=540, attention_tflops=480, nvlink_gb=360, nic_gb=45, copy_gb=40, memory_gb=80),
    _gpu("h800", linear_tflops=540, attention_tflops=480, nvlink_gb=160, nic_gb=45, copy_gb=40, memory_gb=80),
    _gpu("h200", linear_tflops=560, attention_tflops=480, nvlink_gb=360, nic_gb=45, copy_gb=40, memory_gb=141),
    _gpu("a100", linear_tflops=190, attention_tflops=170, nvlink_gb=240, nic_gb=22, copy_gb=20, memory_gb=80),
    _paper_cluster(paper_constants()),
)
CLUSTERS: dict[str, ClusterSpec] = {cluster.name: cluster for cluster in _CLUSTERS}


def model_shape(name: str) -> ModelShape:
    """The named model, or a `UserError` that names the nearest."""
    if name not in MODELS:
        raise UserError(f"unknown model {name!r}; {nearest(name, MODELS)}")
    return MODELS[name]


def cluster_spec(name: str) -> ClusterSpec:
    """The named cluster, or a `UserError` that names the nearest."""
    if name not in CLUSTERS:
        raise UserError(f"unknown cluster {name!r}; {nearest(name, CLUSTERS)}")
    return CLUSTERS[name]


def preset_cost(
    model: str = "llama-7b", cluster: str = "h100", *, tp_size: int = 1, recompute: bool = False
) -> CostModel:
    """The cost model of a named model on a named cluster."""
    return cost_model(model_shape(model), cluster_spec(cluster), tp_size=tp_size, recompute=recompute)


def dense_flops(num_layers: int = 32) -> CostModel:
    """Counts s*(12h + s) with h = 4096 and nothing else; backward twice the forward; the unit is 1 at 400 TFLOP/s."""
    hidden_size = 4096
    unit_s = 2 * hidden_size / 400e12
    free = Link(0.0, float("inf"))
    return CostModel(
        name="dense-flops",
        num_layers=num_layers,
        forward=DirectionCost(unit_s, 12 * hidden_size * unit_s, 0.0, 1.0),
        backward=DirectionCost(2 * unit_s, 24 * hidden_size * unit_s, 0.0, 2.0),
        kv_bytes_per_token=_7B.kv_bytes_per_token,
        activation_bytes_per_token=_7B.activation_bytes_per_token,
        intra_node=free,
        inter_node=free,
        copy_bytes_per_s=40e9,
    )
