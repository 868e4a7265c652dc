"""Layers with a pool of keys and values."""
