"""Quantised checkpoints: what matrices of other libraries stand for, and what a device keeps of them."""
