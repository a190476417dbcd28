"""Checkpoints of a run in slices: what each rank holds, how it is stored, and how any layout reads it back."""
