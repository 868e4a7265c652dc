"""How requests edit tokens that are committed, in the arrays of a batch."""

from collections.abc import Sequence

import numpy as np

from jdllm.arrays import padded
from jdllm.decoding.editing import NEVER, Editing
from jdllm.models.config import ModelConfig
from jdllm.serving.request import Request


def packed_editing(requests: Sequence[Request], config: ModelConfig, segments: int) -> Editing | None:
    """`Batch.editing` of some requests, padded to so many segments.

    `None` for models that no request edits with. For others the arrays are there whatever the requests ask
    for, so that the same executables serve them.
    """
    if config.attention != "block_causal" or config.logits_shift or config.causal_context:
        return None
    asked = [request.sampling.editing_threshold for request in requests]
    threshold = np.array([NEVER if each is None else each for each in asked], np.float32)
    post_left = np.array([request.post_left for request in requests], np.int32)
    return Editing(padded(threshold, segments, NEVER), padded(post_left, segments))
