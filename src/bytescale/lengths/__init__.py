"""Distributions of sequence lengths: named ones, files, and drawing from them."""
