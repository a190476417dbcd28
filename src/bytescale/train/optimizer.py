"""AdamW on sharded fp32 states, with linear warm-up and cosine decay.

Learning rate of step n (from 1), with w warm-up steps, N steps, peak p and floor f = min_lr_ratio * p:

    n <= w:  p * n / w;        else:  f + (p - f) / 2 * (1 + cos(pi * (n - w - 1) / max(1, N - w)))

so the first step after the warm-up runs at the peak. Matrices decay; norms and biases do not.
"""

import math

import torch
from torch import nn

from bytescale.config.schema import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Rate of `step`, counted from 1."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    floor = config.lr * config.min_lr_ratio
    progress = (step - config.warmup_steps - 1) / max(1, config.steps - config.warmup_steps)
    return floor + 0.5 * (config.lr - floor) * (1 + math.cos(math.pi * min(1.0, progress)))


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the (sharded) parameters of `model`."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    plain = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=(config.beta1, config.beta2)
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` in every group from now on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
