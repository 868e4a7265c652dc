"""Memory planning: which operators are chunked, and how much memory a step may use."""
