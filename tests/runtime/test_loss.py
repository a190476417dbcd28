"""Head and loss in chunks: exact, and no worse for being cut."""

import pytest
import torch
import torch.nn.functional as F

from bytescale.data.reader import IGNORED_LABEL
from bytescale.runtime.model.loss import token_loss_sum

T, E, V = 1024, 64, 512


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, head and labels, half of them one frequent token."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, E, generator=generator).bfloat16()
    head = (torch.randn(V, E, generator=generator) * 0.1).bfloat16()
    labels = torch.randint(0, V, (T,), generator=generator)
    labels[: T // 2] = 3
    labels[::7] = IGNORED_LABEL
    return hidden, head, labels


def with_gradients(
    dtype: torch.dtype, chunk_rows: int | None, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, gradient of the hidden states and of the head; without chunks by plain cross-entropy."""
    hidden, head, labels = inputs()
    h, w = hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_()
    if chunk_rows is None:
        loss = F.cross_entropy(h @ w.T, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    else:
        loss = token_loss_sum(h, w, labels, chunk_rows)
    (loss * scale).backward()
    assert h.grad is not None and w.grad is not None
    return loss.detach(), h.grad, w.grad


@pytest.mark.parametrize("chunk_rows", [100, T, 4096])
def test_any_chunks_are_exact(chunk_rows: int) -> None:
    for ours, right in zip(
        with_gradients(torch.float64, chunk_rows, 0.5), with_gradients(torch.float64, None, 0.5), strict=True
    ):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


def test_the_error_of_the_head_does_not_grow_with_chunks() -> None:
    """In bf16: sums over chunks are fp32, so many chunks add no more rounding than few do."""
    _, _, right = with_gradients(torch.float64, None)
    errors = {
        num_chunks: float((with_gradients(torch.bfloat16, T // num_chunks)[2].double() - right).norm() / right.norm())
        for num_chunks in (1, 4, 16, 64, 256)
    }
    assert max(errors.values()) <= 2 * errors[1], errors
    assert max(errors.values()) <= 0.004, errors


def test_no_targets_and_no_rows() -> None:
    hidden, head, _ = inputs()
    h, w = hidden.requires_grad_(), head.requires_grad_()
    loss = token_loss_sum(h, w, torch.full((T,), IGNORED_LABEL))
    (loss * 0).backward()
    assert loss == 0 and h.grad is not None and not h.grad.any() and w.grad is not None and not w.grad.any()
    assert token_loss_sum(h[:0], w, torch.empty(0, dtype=torch.long)) == 0
    with torch.no_grad():
        assert token_loss_sum(h, w, torch.zeros(T, dtype=torch.long)).dtype == torch.float32
