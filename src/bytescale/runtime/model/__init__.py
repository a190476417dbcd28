"""Hugging Face decoders: building, checking, cutting into stages, and the loss."""
