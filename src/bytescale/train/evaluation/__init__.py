"""The loss on documents that are not trained on: which ones, and measuring it on the ranks of a run."""
