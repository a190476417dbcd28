"""The trained model as a checkpoint on disk: weights, side files, and putting one model in the place of another."""
