"""The step loop: `world` (ranks and groups), `step` (gather, compute, reduce), `optimizer`, `metrics`, `trainer`."""
