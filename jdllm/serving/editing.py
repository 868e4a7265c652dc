"""How requests edit tokens that are committed, in the arrays of a batch."""

from collections.abc import Sequence

import numpy as np

from jdllm.arrays import padded
from jdllm.decoding.editing import NEVER, Editing
from jdllm.models.config import ModelConfig
from jdllm.planning.ladder import Entry
from jdllm.serving.request import Request


def packed_editing(
    requests: Sequence[Request], rows: Sequence[np.ndarray], config: ModelConfig, entry: Entry
) -> Editing | None:
    """`Batch.editing` of some requests.

    Arguments:
    - `requests`: of the batch, each of which forwards whole blocks.
    - `rows`: the packed rows of the head rows of each of them.
    - `config`: the model.
    - `entry`: the sizes of the arrays.

    `None` for models that no request edits with. For others the arrays are there whatever the requests ask
    for, so that the same executables serve them; only a penalty needs other ones.
    """
    if config.attention != "block_causal" or config.logits_shift or config.causal_context:
        return None
    asked = [request.sampling.editing_threshold for request in requests]
    threshold = np.array([NEVER if each is None else each for each in asked], np.float32)
    post_left = np.array([request.post_left for request in requests], np.int32)
    penalty = np.array([request.sampling.penalty_lambda for request in requests], np.float32)
    size = entry.segments
    left = padded(_left(requests, rows), entry.head_rows, -1) if penalty.any() else None
    return Editing(padded(threshold, size, NEVER), padded(post_left, size), left, padded(penalty, size))


def _left(requests: Sequence[Request], rows: Sequence[np.ndarray]) -> np.ndarray:
    """The packed row to the left of each head row; -1 for the first position of a block."""
    firsts = [request.candidates() == request.forwarded[0] for request in requests]
    found = [np.where(first, -1, row - 1) for first, row in zip(firsts, rows, strict=True)]
    return np.concatenate(found).astype(np.int32)
