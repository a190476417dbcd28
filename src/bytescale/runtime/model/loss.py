"""Token loss: language-model head and cross-entropy in one chunked operation, summed over targets.

Equation: loss_sum = sum over rows with label >= 0 of -log softmax(W h)[label]. The division by the number of targets of
the global batch happens once, at the gradient reduction (`bytescale.runtime.fsdp`), so any split of a batch over
ranks and micro-batches adds up to the same gradient.

torch's chunked `linear_cross_entropy` never holds the logits of the whole micro-batch. It allows one backward. Its sum
in bf16 is wrong in the fourth digit, so for 16-bit types the losses are taken per token and summed in fp32.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch.nn import LinearCrossEntropyOptions

IGNORED = -100
"""Label of a row that is not a target."""


def token_loss_sum(hidden_TE: torch.Tensor, head_VE: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropy over all targets, an fp32 (fp64 for fp64) scalar.

    Args:
        hidden_TE: final hidden states, T rows.
        head_VE: weight of the language-model head.
        labels_T: next token of each row, already shifted inside its sequence; `IGNORED` where there is none.
    """
    if hidden_TE.dtype in (torch.float32, torch.float64):
        return F.linear_cross_entropy(
            hidden_TE,
            head_VE,
            labels_T,
            reduction="sum",
            ignore_index=IGNORED,
            options=LinearCrossEntropyOptions(),
        )
    # On CPU the default policy multiplies 16-bit matrices several times slower than this one.
    policy: Literal["accurate", "auto"] = "accurate" if hidden_TE.device.type == "cpu" else "auto"
    loss_T = F.linear_cross_entropy(
        hidden_TE,
        head_VE,
        labels_T,
        reduction="none",
        ignore_index=IGNORED,
        options=LinearCrossEntropyOptions(acc_policy=policy),
    )
    return loss_T.float().sum()
