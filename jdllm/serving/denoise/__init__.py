"""Serving models that denoise: steps of whole sequences, and steps with a cache."""
