"""Which tokens a piece holds, under its documented name; it lives in `bytescale.plan.zigzag`."""

from bytescale.plan.zigzag import piece_positions, piece_runs, piece_tokens

__all__ = ["piece_positions", "piece_runs", "piece_tokens"]
