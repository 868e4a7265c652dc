"""Layers of few rows, a matter of streaming weights."""
