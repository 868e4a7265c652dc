"""Requests, the scheduler that packs them, and the engine that denoises them."""
