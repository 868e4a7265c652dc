"""Serving causal models: prompts in parts, then one token after another."""
