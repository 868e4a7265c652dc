"""Prefilling-dLLM: a long context is cut, scored, thinned out and cached, and then only read."""
