"""Fig. 16: what a fused cross-entropy saves, predicted from the bytes that each pass over the logits moves.

The paper prints kernel times on a GPU it does not name. The loss is bound by memory, so times go as bytes: an entry of
the logits is 2 bytes in bf16, 4 in fp32; the unfused chain makes a pass for every operation, the fused kernel reads the
logits once in the forward, and reads and writes them once in the backward. Ours is the ratio of bytes, the paper's the
ratio of times; what of 5.03 and 2.12 ms belongs to 0.78 and 0.91 ms is inferred there.

What the product runs is torch's `linear_cross_entropy`, which is not this kernel; its times on a CPU stand in
docs/performance.md. Cost: nothing.
"""

from bytescale.reproduction.published import published
from bytescale.reproduction.rows import Row

BF16, FP32 = 2, 4
UNFUSED_FORWARD = {
    "cast to fp32": BF16 + FP32,
    "maximum of a row": FP32,
    "subtract it": 2 * FP32,
    "exponential": 2 * FP32,
    "sum of a row": FP32,
}
"""Bytes an entry of the logits moves in each pass of the chain."""

UNFUSED_BACKWARD = {"softmax from what was kept": 2 * FP32, "subtract one, scale": FP32, "cast back": FP32 + BF16}
FUSED_FORWARD = {"online maximum and sum": BF16}
FUSED_BACKWARD = {"read, softmax, write": 2 * BF16}


def figure_16() -> list[Row]:
    """Bytes of the chain over bytes of the kernel, forward, backward and both."""
    times_ms = published()["fig16"]["times_ms"]
    parts = {
        "forward": (sum(UNFUSED_FORWARD.values()), sum(FUSED_FORWARD.values())),
        "backward": (sum(UNFUSED_BACKWARD.values()), sum(FUSED_BACKWARD.values())),
    }
    parts["both"] = (sum(chain for chain, _ in parts.values()), sum(fused for _, fused in parts.values()))
    given = {name: times_ms[f"unfused_{name}"] / times_ms[f"fused_{name}"] for name in ("forward", "backward")}
    chain_ms, fused_ms = (
        sum(times_ms[f"{kind}_{name}"] for name in ("forward", "backward")) for kind in ("unfused", "fused")
    )
    given["both"] = chain_ms / fused_ms
    return [
        Row(
            "fig16",
            f"unfused / fused, {name}",
            chain / fused,
            given[name],
            extra={"bytes_an_entry_unfused": chain, "bytes_an_entry_fused": fused},
        )
        for name, (chain, fused) in parts.items()
    ]
