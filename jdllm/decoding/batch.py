"""The arrays of one packed denoising step."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int, UInt32

from jdllm.arrays import Tensor
from jdllm.models.transformer import Rows

PADDING_BANS = -1
"""A ban id that bans nothing."""

BANS = 2
"""Bans of each kind that a segment may set."""


class HeadRows(NamedTuple):
    """The rows that may commit before the dispatch ends, and where their guidance comes from.

    - `row`: index of the row among the packed rows.
    - `unguided`: index of the row's copy that does not see the prompt; `row` itself without guidance.
    - `segment`: the segment of the row; the number of segments for padding.
    """

    row: Int[Tensor, " head"]
    unguided: Int[Tensor, " head"]
    segment: Int[Tensor, " head"]


class SegmentParams(NamedTuple):
    """What each segment asks of the sampler: arrays, so that one executable serves any mix.

    - `seed`: two words of the request's seed.
    - `step`: denoising steps that the request has behind it.
    - `block_step`, `block_steps`: steps done in the current block, and steps that it has; 0 for padding.
    - `quota`: tokens that each step of the block commits, before the remainder.
    - `remainder`: the first so many steps of the block commit one more.
    - `temperature`, `guidance`: token temperature and classifier-free guidance scale.
    - `random_order`: confidences are uniform draws.
    - `coarse_confidence`: confidences are rounded to the dtype of the weights.
    - `stop_last`: rows whose token is one of `confidence_bans` rank last; the softmax is left alone.
    - `token_bans`, `confidence_bans`: as in `masked_logits`.
    """

    seed: UInt32[Tensor, "segments 2"]
    step: Int[Tensor, " segments"]
    block_step: Int[Tensor, " segments"]
    block_steps: Int[Tensor, " segments"]
    quota: Int[Tensor, " segments"]
    remainder: Int[Tensor, " segments"]
    temperature: Float[Tensor, " segments"]
    guidance: Float[Tensor, " segments"]
    random_order: Bool[Tensor, " segments"]
    coarse_confidence: Bool[Tensor, " segments"]
    stop_last: Bool[Tensor, " segments"]
    token_bans: Int[Tensor, "segments bans"]
    confidence_bans: Int[Tensor, "segments bans"]


class Batch(NamedTuple):
    """One packed batch: tokens and rows of all segments, the head rows, and the segments' parameters."""

    tokens: Int[Tensor, " rows"]
    rows: Rows
    head: HeadRows
    segments: SegmentParams


class Trace(NamedTuple):
    """What a dispatch did, step by step, for the head rows in their given order.

    - `steps`: denoising steps that ran.
    - `tokens`: the choice for every head row at each step; meaningful where the row was masked.
    - `committed`: the rows whose choice was committed at each step.
    """

    steps: Int[Array, ""]
    tokens: Int[Array, "capacity head"]
    committed: Bool[Array, "capacity head"]
