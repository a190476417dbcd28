"""Token loss: language-model head and cross-entropy in one operation over chunks of rows, summed over targets.

Equation: loss_sum = sum over rows with label >= 0 of -log softmax(W h)[label]. The division by the number of targets of
the global batch happens once, at the gradient reduction (`bytescale.runtime.fsdp`), so any split of a batch over
ranks and micro-batches adds up to the same gradient.

The gradients are computed with the loss, chunk by chunk, while the logits exist: with p = softmax(W h) and one-hot y,

    dh = (p - y) W,    dW = sum over chunks of (p - y)^T h

so the head is multiplied once forwards, and the logits of the whole micro-batch are never held. Losses, softmax and the
sum of dW over chunks are fp32 (fp64 for fp64) whatever the type of the model, so the error of dW does not grow with
the number of chunks. Memory: the logits of `CHUNK_ROWS` rows twice, and dW until the backward.

With tensor parallelism each of the TP ranks has its own rows of h and a share of the vocabulary, that is of the rows of
W. Chunk by chunk the hidden states of all ranks are gathered, their logits taken over the own share, and

    log-sum-exp = log-sum-exp over the ranks of theirs,    h's own logit = the sum, over the ranks, of who has it,

so dW is that of the share and dh a term of a sum, whose own rows each rank keeps. Two small numbers a row and the
hidden states travel, never logits. Every rank returns the same loss: it counts once.
"""

from typing import Any

import torch
from torch import Tensor

from bytescale.data.reader import IGNORED_LABEL
from bytescale.runtime.tensor_parallel.group import TensorGroup

"""Label of a row that is not a target."""

CHUNK_ROWS = 2048
"""Rows whose logits are held at once: enough for matrix multiplications to be efficient."""


def token_loss_sum(
    hidden_RE: Tensor,
    head_VE: Tensor,
    labels_T: Tensor,
    chunk_rows: int = CHUNK_ROWS,
    tp: TensorGroup | None = None,
    first_token: int = 0,
) -> Tensor:
    """Sum of the cross-entropy over all targets, an fp32 (fp64 for fp64) scalar.

    Args:
        hidden_RE: final hidden states, T rows; with `tp` this rank's R = T / tp.size of them.
        head_VE: weight of the language-model head; with `tp` this rank's share of its rows.
        labels_T: next token of each row, already shifted inside its sequence; `IGNORED_LABEL` after the last token.
        chunk_rows: rows of a chunk.
        tp: the ranks that share the vocabulary.
        first_token: the id that row 0 of `head_VE` stands for.
    """
    if not torch.is_grad_enabled():
        # Inside an autograd function, whether a tensor asks for a gradient says nothing of that.
        head_VE = head_VE.detach()
    loss: Tensor = _HeadLoss.apply(hidden_RE, head_VE, labels_T, chunk_rows, tp, first_token)  # type: ignore[no-untyped-call]
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RE: Tensor,
        head_VE: Tensor,
        labels_T: Tensor,
        chunk_rows: int,
        tp: TensorGroup | None,
        first_token: int,
    ) -> Tensor:
        needs_hidden, needs_head, *_ = ctx.needs_input_grad
        dtype = torch.float64 if hidden_RE.dtype == torch.float64 else torch.float32
        loss = torch.zeros((), dtype=dtype, device=hidden_RE.device)
        dhidden_RE = torch.empty_like(hidden_RE) if needs_hidden else None
        dhead_VE = torch.zeros_like(head_VE, dtype=dtype) if needs_head else None
        labels_NR = labels_T.view(1 if tp is None else tp.size, -1)
        chunk_rows = chunk_rows // len(labels_NR) or 1
        for begin in range(0, len(hidden_RE), chunk_rows):
            rows = slice(begin, begin + chunk_rows)
            labels_C = labels_NR[:, rows].flatten()
            hidden_CE = hidden_RE[rows] if tp is None else tp.gather(hidden_RE[rows])
            logits_CV = (hidden_CE @ head_VE.T).to(dtype)
            is_target_C1 = (labels_C != IGNORED_LABEL).unsqueeze(1)
            label_C1 = (labels_C - first_token).unsqueeze(1)
            is_here_C1 = (label_C1 >= 0) & (label_C1 < len(head_VE))
            label_C1 = label_C1.masked_fill(~is_here_C1, 0)
            lse_C1 = logits_CV.logsumexp(1, keepdim=True)
            own_C1 = logits_CV.gather(1, label_C1).masked_fill(~is_here_C1, 0)
            if tp is not None:
                lse_NC1, own_NC1 = tp.gather(torch.stack([lse_C1, own_C1])[None]).unbind(1)
                lse_C1, own_C1 = lse_NC1.logsumexp(0), own_NC1.sum(0)
            loss += ((lse_C1 - own_C1) * is_target_C1).sum()
            if dhidden_RE is None and dhead_VE is None:
                continue
            dlogits_CV = logits_CV.sub_(lse_C1).exp_()
            dlogits_CV.scatter_add_(1, label_C1, -is_here_C1.to(dtype))
            part_CV = dlogits_CV.mul_(is_target_C1).to(hidden_RE.dtype)
            if dhidden_RE is not None:
                if tp is None:
                    torch.mm(part_CV, head_VE, out=dhidden_RE[rows])
                else:
                    dhidden_RE[rows] = tp.sum_rows(part_CV @ head_VE)
            if dhead_VE is not None:
                dhead_VE += part_CV.T @ hidden_CE
        ctx.dtypes = hidden_RE.dtype, head_VE.dtype
        ctx.save_for_backward(dhidden_RE, dhead_VE)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (
            None if gradient is None else (gradient * dloss).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*gradients, None, None, None, None)
