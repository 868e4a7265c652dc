"""Layers whose rows, keys and values or weights are in host memory."""
