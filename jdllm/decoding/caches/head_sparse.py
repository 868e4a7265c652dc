"""The sparse cache of dLLM-Serve: as Sparse-dLLM, for each key-value head alone."""

import dataclasses

from jdllm.decoding.caches import sparse

POLICY = dataclasses.replace(
    sparse.POLICY, name="head_sparse", help="the same for each key-value head (dLLM-Serve)", per_head=True
)
