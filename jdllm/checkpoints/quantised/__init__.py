"""Quantised checkpoints, whose weights are loaded in 16 bits."""
