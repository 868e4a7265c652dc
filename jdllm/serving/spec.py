"""What a request asks for: its sequence, its blocks and its parameters, checked."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jdllm.checkpoints.token_text import Decode
from jdllm.decoding.cache_policies import kept, policy_of
from jdllm.decoding.causal_sampling import check_denoising, check_unstructured
from jdllm.decoding.rules import adaptive_row, rule_of, segment_row, step_table
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.schedule import StepTable, block_steps
from jdllm.decoding.transfer.rule import Acceptance
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig

if TYPE_CHECKING:
    from jdllm.structured.matching import Grammar, Matcher


class Block(NamedTuple):
    """A block of semi-autoregressive remasking.

    - `start`, `stop`: its positions; masks before `start` may commit in it too, later ones may not.
    - `masks`: masked positions inside it when the request is made.
    - `table`: what its denoising steps may commit.
    """

    start: int
    stop: int
    masks: int
    table: StepTable


@dataclasses.dataclass(frozen=True, eq=False)
class RequestSpec:
    """What a request asks for. Immutable: it may be added to any engine of the model, any number of times.

    - `prompt`: int32 ids that the request came with; masks among them are to be filled.
    - `tokens`: int32 `[length]`, the whole sequence at the start: the prompt, then masks. Read-only.
    - `blocks`: the blocks to denoise, from left to right.
    - `returned`: the part of the sequence that is the result.
    - `sampling`: how it is denoised.
    - `mask_id`, `shifted`: of the model: its mask, and whether its logits are shifted.
    - `stop_ids`: ids that end the text; `decode`: ids to text, for the stop strings of `sampling`.
    - `segment`: what the steps need to know of `sampling`, one entry of the arrays of a batch.
    - `grammar`: the form of the answer, compiled, where `sampling` has a `structure`.
    """

    prompt: np.ndarray
    tokens: np.ndarray
    blocks: tuple[Block, ...]
    returned: slice
    sampling: SamplingParams
    mask_id: int
    shifted: bool
    stop_ids: tuple[int, ...]
    decode: Decode | None
    segment: Mapping[str, Any]
    grammar: "Grammar | None" = dataclasses.field(default=None, kw_only=True)

    def matcher(self) -> "Matcher | None":
        """A matcher at the beginning of the answer; `None` where the answer may have any form.

        Raises `RequestError` where there is a form and no `grammar`.
        """
        if self.sampling.structure is None:
            return None
        if self.grammar is None:
            raise RequestError("structure needs a compiled grammar in the request: ask LLM.spec for one")
        return self.grammar.matcher()

    @property
    def cached(self) -> bool:
        return policy_of(self.sampling) is not None

    @property
    def in_order(self) -> bool:
        """Whether each step commits the next token of the text."""
        return False

    @property
    def refreshes_once(self) -> bool:
        """Whether only the first step of the request stores keys and values: those of the prompt alone."""
        policy = policy_of(self.sampling)
        return policy is not None and policy.once

    @property
    def forces_first(self) -> bool:
        """Whether the first step of a block commits the block's first token, and no other."""
        return self.shifted and self.cached and self.sampling.effective("official_forcing")

    @property
    def adaptive(self) -> bool:
        """Whether adaptive parallel decoding takes its steps."""
        return self.sampling.adaptive

    @property
    def acceptance(self) -> Acceptance | None:
        """The part of its transfer rule that runs on the device; `None` where another model decides."""
        return rule_of(self.sampling).acceptance

    @property
    def guided(self) -> bool:
        """Whether each step also evaluates a copy that does not see the prompt."""
        return self.sampling.cfg_scale > 0

    @property
    def rows(self) -> int:
        """Packed rows of its largest step."""
        return len(self.evaluated(self.blocks[-1])) * (2 if self.guided else 1)

    def evaluated(self, block: Block) -> np.ndarray:
        """Positions that a full step or a refresh evaluates in a block, rising.

        With a `suffix_window` these are all but the masks behind the block, of which only the first so many
        and the last position are evaluated. Masks behind the block are those of the start.
        """
        every, window = np.arange(len(self.tokens)), self.sampling.suffix_window
        if window is None:
            return every
        behind = block.stop + np.flatnonzero(self.tokens[block.stop : -1] == self.mask_id)
        return np.delete(every, behind[window:])

    @property
    def positions(self) -> int:
        """Rotary positions that it uses."""
        return len(self.tokens)

    @property
    def stored_rows(self) -> int:
        """Rows of the KV pool that it may ever need."""
        return kept(self.sampling, len(self.evaluated(self.blocks[-1])))


class FrontierSpec(RequestSpec):
    """What a request asks whose answer has a form: each step commits the first mask of the answer."""

    @property
    def in_order(self) -> bool:
        return True


def generation_spec(
    prompt: Sequence[int] | np.ndarray,
    sampling: SamplingParams,
    config: ModelConfig,
    decode: Decode | None = None,
) -> RequestSpec:
    """A request that appends `sampling.gen_length` masks to `prompt` and fills them block by block, as far as
    `max_tokens` reaches.

    `decode`: ids to text, for stop strings.

    An empty prompt asks for any text: all is masked at the start.

    Raises `RequestError` for an id outside the vocabulary, a mask id in the prompt (unless `prompt_masks` is
    "official"), lengths that do not divide, stop strings without `decode`, or an empty prompt where a
    verifier would have nothing to go on with.
    """
    if sampling.prefilling is not None:
        raise RequestError(
            "prefilling is for prompts with a long context: give a LongPrompt, or leave it out"
        )
    check_stops(sampling, config, decode)
    prompt = checked_ids(prompt, config, may_be_empty=not sampling.adaptive)
    mask_id = mask_id_of(config)
    without_masks(prompt, sampling, mask_id)
    gen_length = sampling.gen_length
    block_length = sampling.block_length or gen_length
    steps = block_steps(gen_length, sampling.steps or gen_length, block_length)
    start = len(prompt)
    # Dream's sampler without a cache has one block, which counts the masks of the prompt too.
    masks = block_length if sampling.alg is None else block_length + int((prompt == mask_id).sum())
    table = step_table(sampling, masks, steps, start + gen_length)
    blocks = [
        Block(at, at + block_length, block_length, table)
        for at in range(start, start + (sampling.max_tokens or gen_length), block_length)
    ]
    tokens = np.concatenate([prompt, np.full(gen_length, mask_id, np.int32)])
    returned = slice(start, start + min(sampling.max_tokens or gen_length, gen_length))
    stop_ids = (*config.stop_ids, *sampling.stop_token_ids)
    return _spec(prompt, tokens, blocks, returned, sampling, config, stop_ids, decode)


def infill_spec(
    tokens: Sequence[int] | np.ndarray,
    sampling: SamplingParams,
    config: ModelConfig,
) -> RequestSpec:
    """A request that fills the masks inside `tokens`.

    The masked positions, in order, are cut into blocks of `block_length` masks (the last may be shorter);
    each block is finished before the next. `gen_length`, `max_tokens` and `early_stop` do not apply; `steps`
    defaults to one a mask, and is otherwise a multiple of the number of blocks. Raises `RequestError` as
    `generation_spec` does, where nothing is masked, for stop strings or ids, and with a block model.
    """
    if sampling.prefilling is not None:
        raise RequestError("prefilling is for prompts with a long context, not for infilling: leave it out")
    if config.attention == "block_causal":
        raise RequestError(
            "infill_spec is for models that see whole sequences: LLM.infill_spec serves block models too"
        )
    if sampling.stop or sampling.stop_token_ids:
        raise RequestError("a sequence to infill has no end to stop at: leave stop and stop_token_ids out")
    check_unstructured(sampling, "is for answers, which have an end, and a sequence to infill has none")
    if sampling.min_tokens:
        raise RequestError("a sequence to infill has no end to put off: leave min_tokens out")
    tokens = checked_ids(tokens, config)
    masks = np.flatnonzero(tokens == mask_id_of(config))
    if not len(masks):
        raise RequestError(f"nothing to infill: the sequence has no mask id {config.mask_id}")
    length = sampling.block_length or len(masks)
    groups = [masks[at : at + length] for at in range(0, len(masks), length)]
    if sampling.steps is not None and sampling.steps % len(groups):
        raise RequestError(
            f"steps {sampling.steps} is not divisible by the number of blocks {len(groups)}"
            f" ({len(masks)} masks / block_length {length})"
        )
    blocks = []
    for group in groups:
        steps = sampling.steps // len(groups) if sampling.steps else len(group)
        table = step_table(sampling, len(group), steps, len(masks))
        blocks.append(Block(int(group[0]), int(group[-1]) + 1, len(group), table))
    return _spec(tokens, tokens, blocks, slice(0, len(tokens)), sampling, config)


def _spec(
    prompt: np.ndarray,
    tokens: np.ndarray,
    blocks: Sequence[Block],
    returned: slice,
    sampling: SamplingParams,
    config: ModelConfig,
    stop_ids: tuple[int, ...] = (),
    decode: Decode | None = None,
) -> RequestSpec:
    check_denoising(sampling)
    tokens.setflags(write=False)
    segment = (adaptive_row if sampling.adaptive else segment_row)(sampling, config)
    mask_id = mask_id_of(config)
    return (RequestSpec if sampling.structure is None else FrontierSpec)(
        prompt,
        tokens,
        tuple(blocks),
        returned,
        sampling,
        mask_id,
        config.logits_shift,
        stop_ids,
        decode,
        segment,
    )


def check_stops(sampling: SamplingParams, config: ModelConfig, decode: Decode | None) -> None:
    """Raise `RequestError` for stop strings without `decode`, and for stop ids outside the vocabulary."""
    if sampling.stop and decode is None:
        raise RequestError("stop strings need tokenizer files, which this model has not: use stop_token_ids")
    for i in sampling.stop_token_ids:
        if i >= config.vocab_size:
            raise RequestError(
                f"stop_token_ids has {i}, outside the vocabulary (0 to {config.vocab_size - 1})"
            )


def without_masks(prompt: np.ndarray, sampling: SamplingParams, mask_id: int) -> None:
    """Raise `RequestError` for a mask in a prompt, int32 `[length]`, unless `prompt_masks` allows masks."""
    if sampling.prompt_masks == "error" and (prompt == mask_id).any():
        at = int(np.flatnonzero(prompt == mask_id)[0])
        raise RequestError(
            f"the prompt contains the mask id {mask_id} at position {at}: remove it, use infill, or set"
            " prompt_masks='official' to have it filled as the official sampler does"
        )


def mask_id_of(config: ModelConfig) -> int:
    """The mask id, or `RequestError` where the checkpoint does not name one."""
    if config.in_order:
        raise RequestError("a causal model has no mask: it generates behind a prompt and fills nothing in")
    if config.mask_id is None:
        raise RequestError(
            "the model has no mask id (mask_token_id in config.json): it cannot denoise;"
            " name it with hf_overrides={'mask_token_id': ...} if the checkpoint has one"
        )
    if config.mask_id >= config.vocab_size:
        raise RequestError(
            f"the mask id {config.mask_id} (mask_token_id in config.json) is outside the vocabulary"
            f" (0 to {config.vocab_size - 1})"
        )
    return config.mask_id


def checked_ids(
    ids: Sequence[int] | np.ndarray, config: ModelConfig, *, may_be_empty: bool = False
) -> np.ndarray:
    """`ids` as int32 `[length]`; `RequestError` where they are no flat list of ids of the vocabulary."""
    try:
        ids = np.asarray(ids)
    except ValueError:
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise RequestError("token ids must be a flat list of integers, one list for each prompt")
    if not ids.size and not may_be_empty:
        raise RequestError("the prompt is empty: give at least one token")
    outside = (ids < 0) | (ids >= config.vocab_size)
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        raise RequestError(
            f"token id {ids[at]} at position {at} is outside the vocabulary (0 to {config.vocab_size - 1})"
        )
    return ids.astype(np.int32)
