"""Estimates: what a piece, a micro-batch and a step cost. numpy only; imports nothing above the values."""

from bytescale.cost.makespan import Makespan, makespan
from bytescale.cost.micro_batch import Attention, Ulysses, head_exchange
from bytescale.cost.model import ClusterSpec, CostModel, DirectionCost, Link, ModelShape, cost_model, rank_time_s
from bytescale.cost.predict import Durations, durations, lower_bound_s, predict
from bytescale.cost.presets import CLUSTERS, MODELS, cluster_spec, dense_flops, model_shape, preset_cost
from bytescale.cost.traffic import attention_bytes, attention_traffic_tokens

__all__ = [
    "CLUSTERS",
    "MODELS",
    "Attention",
    "ClusterSpec",
    "CostModel",
    "DirectionCost",
    "Durations",
    "Link",
    "Makespan",
    "ModelShape",
    "Ulysses",
    "attention_bytes",
    "attention_traffic_tokens",
    "cluster_spec",
    "cost_model",
    "dense_flops",
    "durations",
    "head_exchange",
    "lower_bound_s",
    "makespan",
    "model_shape",
    "predict",
    "preset_cost",
    "rank_time_s",
]
