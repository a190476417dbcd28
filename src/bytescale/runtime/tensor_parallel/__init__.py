"""Tensor parallelism: the ranks that share every layer of one HDP rank."""
