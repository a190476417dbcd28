"""The figures: each module computes rows of ours beside the published numbers."""
