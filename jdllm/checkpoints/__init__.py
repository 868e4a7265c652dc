"""Checkpoints on disk: their index and tensors, native ones, conversion, and the tokenizer."""
