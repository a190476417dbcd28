"""Token loss: language-model head and cross-entropy in one operation over chunks of rows, summed over targets.

Equation: loss_sum = sum over rows with label >= 0 of -log softmax(W h)[label]. The division by the number of targets of
the global batch happens once, at the gradient reduction (`bytescale.runtime.fsdp`), so any split of a batch over
ranks and micro-batches adds up to the same gradient.

The gradients are computed with the loss, chunk by chunk, while the logits exist: with p = softmax(W h) and one-hot y,

    dh = (p - y) W,    dW = sum over chunks of (p - y)^T h

so the head is multiplied once forwards, and the logits of the whole micro-batch are never held. Losses, softmax and the
sum of dW over chunks are fp32 (fp64 for fp64) whatever the type of the model, so the error of dW does not grow with
the number of chunks. Memory: the logits of `CHUNK_ROWS` rows twice, and dW until the backward.
"""

from typing import Any

import torch
from torch import Tensor

from bytescale.data.micro_batch import IGNORED_LABEL

"""Label of a row that is not a target."""

CHUNK_ROWS = 2048
"""Rows whose logits are held at once: enough for matrix multiplications to be efficient."""


def token_loss_sum(hidden_TE: Tensor, head_VE: Tensor, labels_T: Tensor, chunk_rows: int = CHUNK_ROWS) -> Tensor:
    """Sum of the cross-entropy over all targets, an fp32 (fp64 for fp64) scalar.

    Args:
        hidden_TE: final hidden states, T rows.
        head_VE: weight of the language-model head.
        labels_T: next token of each row, already shifted inside its sequence; `IGNORED_LABEL` after the last token.
        chunk_rows: rows of a chunk.
    """
    if not torch.is_grad_enabled():
        # Inside an autograd function, whether a tensor asks for a gradient says nothing of that.
        head_VE = head_VE.detach()
    loss: Tensor = _HeadLoss.apply(hidden_TE, head_VE, labels_T, chunk_rows)  # type: ignore[no-untyped-call]
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TE: Tensor, head_VE: Tensor, labels_T: Tensor, chunk_rows: int) -> Tensor:
        needs_hidden, needs_head, *_ = ctx.needs_input_grad
        dtype = torch.float64 if hidden_TE.dtype == torch.float64 else torch.float32
        loss = torch.zeros((), dtype=dtype, device=hidden_TE.device)
        dhidden_TE = torch.empty_like(hidden_TE) if needs_hidden else None
        dhead_VE = torch.zeros_like(head_VE, dtype=dtype) if needs_head else None
        for begin in range(0, len(hidden_TE), chunk_rows):
            rows = slice(begin, begin + chunk_rows)
            hidden_CE, is_target_C = hidden_TE[rows], labels_T[rows] != IGNORED_LABEL
            label_C1 = labels_T[rows].clamp_min(0).unsqueeze(1)
            logits_CV = (hidden_CE @ head_VE.T).to(dtype)
            lse_C1 = logits_CV.logsumexp(1, keepdim=True)
            loss += ((lse_C1 - logits_CV.gather(1, label_C1)).squeeze(1) * is_target_C).sum()
            if dhidden_TE is None and dhead_VE is None:
                continue
            dlogits_CV = logits_CV.sub_(lse_C1).exp_()
            dlogits_CV.scatter_add_(1, label_C1, torch.full_like(lse_C1, -1.0))
            part_CV = dlogits_CV.mul_(is_target_C.unsqueeze(1)).to(hidden_TE.dtype)
            if dhidden_TE is not None:
                torch.mm(part_CV, head_VE, out=dhidden_TE[rows])
            if dhead_VE is not None:
                dhead_VE += part_CV.T @ hidden_CE
        ctx.dtypes = hidden_TE.dtype, head_VE.dtype
        ctx.save_for_backward(dhidden_TE, dhead_VE)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (
            None if gradient is None else (gradient * dloss).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*gradients, None, None)
