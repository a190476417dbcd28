"""Benchmarks: what is fast, beside its bound. Run one as `python -m benchmarks.NAME`."""
