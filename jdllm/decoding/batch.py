"""The arrays of one packed denoising step."""

from collections.abc import Mapping
from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from jdllm.arrays import Tensor
from jdllm.decoding.editing import Editing
from jdllm.decoding.transfer.of_rules import OfRules
from jdllm.models.block import Rows
from jdllm.pallas.masked_logits import Likeliest, RowControl

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

    Progress
    - `seed`: two words of the request's seed.
    - `step`: denoising steps that the request has behind it.
    - `steps_left`: steps left in the current block; 0 for padding.

    Token and confidence
    - `temperature`, `guidance`: token temperature and classifier-free guidance scale.
    - `tempered`: measure confidences on logits / temperature instead of clean logits.
    - `top_k`, `top_p`, `min_p`: filters on the tempered distribution; the vocabulary size, 1 and 0 filter
      nothing.
    - `top_k_first`: measure `top_p` on the ids that `top_k` leaves, instead of the whole distribution.
    - `limit`: ids from here on are removed from the distribution.
    - `token_bans`, `confidence_bans`: ids removed from the distribution, and ids removed from confidences
      only; -1 stands for none.
    - `listed`: segments whose likeliest ids are wanted.
    - `control`: which ids may be chosen, and what is added to logits, for segments in place of rows; `None`
      where no segment asks for that.
    - `measure`: a `Measure`.
    - `coarse_confidence`: confidences are rounded to the dtype of the weights.
    - `stop_last`: rows whose token is one of `confidence_bans` rank last; the softmax is left alone.
    - `order_temperature`: where above 0, rows are drawn by softmax(confidence / order_temperature).

    Transfer rule
    - `rule`: the number of the rule in the registry.
    - `quota`, `fraction`: the block's `StepTable` from the current step on.
    - `plus_masked`: the quota counts from the rows that are still masked.
    - `by_fraction`: the quota is `fraction` of the masked rows, truncated.
    - `pooled`: for such a quota the masked rows are averaged over all pooled segments.
    - `options`: the rules' own parameters, and which rules there are.
    """

    seed: UInt32[Tensor, "segments 2"]
    step: Int[Tensor, " segments"]
    steps_left: Int[Tensor, " segments"]
    temperature: Float[Tensor, " segments"]
    guidance: Float[Tensor, " segments"]
    tempered: Bool[Tensor, " segments"]
    top_k: Int[Tensor, " segments"]
    top_p: Float[Tensor, " segments"]
    min_p: Float[Tensor, " segments"]
    top_k_first: Bool[Tensor, " segments"]
    limit: Int[Tensor, " segments"]
    token_bans: Int[Tensor, "segments bans"]
    confidence_bans: Int[Tensor, "segments bans"]
    listed: Bool[Tensor, " segments"]
    measure: Int[Tensor, " segments"]
    coarse_confidence: Bool[Tensor, " segments"]
    stop_last: Bool[Tensor, " segments"]
    order_temperature: Float[Tensor, " segments"]
    rule: Int[Tensor, " segments"]
    quota: Int[Tensor, "segments capacity"]
    fraction: Float[Tensor, "segments capacity"]
    plus_masked: Bool[Tensor, " segments"]
    by_fraction: Bool[Tensor, " segments"]
    pooled: Bool[Tensor, " segments"]
    options: OfRules
    control: RowControl | None = None


class Batch(NamedTuple):
    """One packed batch: tokens and rows of all segments, the head rows, and the segments' parameters.

    - `states`: what rules carry from step to step, before the first step: by the rule's name and the array's.
      Arrays have an entry for each segment, or for each head row in the given order.
    - `editing`: how segments edit tokens that are committed; `None` where no segment could.
    """

    tokens: Int[Tensor, " rows"]
    rows: Rows
    head: HeadRows
    segments: SegmentParams
    states: Mapping[str, Mapping[str, Shaped[Tensor, " entries"]]] = {}
    editing: Editing | None = None


class Trace(NamedTuple):
    """What a dispatch did, step by step, for the head rows in their given order.

    - `steps`: denoising steps that ran.
    - `tokens`: the choice for every head row at each step; 0 where the row was not evaluated.
    - `committed`: the rows whose choice was committed at each step. Only where a segment edits can a row be
      committed again.
    - `logprobs`: f32, the log-probability of each choice in the distribution that probabilities are measured
      on; 0 where the row was not evaluated, and not finite where the model's values were not.
    - `likeliest`: the likeliest ids of each row in that distribution at the step that committed it, or of
      each row at each step; unspecified where none was committed or nobody asked, and `None` below
      `Level.FILTERED`.
    - `states`: `Batch.states` after the last step.
    - `post_left`: `Editing.post_left` after the last step; `None` where no segment could edit.
    """

    steps: Int[Array, ""]
    tokens: Int[Array, "capacity head"]
    committed: Bool[Array, "capacity head"]
    logprobs: Float[Array, "capacity head"]
    likeliest: Likeliest | None
    states: Mapping[str, Mapping[str, Shaped[Array, " entries"]]] = {}
    post_left: Int[Array, " segments"] | None = None
