"""Serving adaptive parallel decoding: a causal verifier beside the model that denoises."""
