"""A request over a long context: what it asks for, and its state, which begins with stages of preparation."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jdllm.checkpoints.token_text import Decode
from jdllm.decoding.cache_policies import Phase
from jdllm.decoding.causal_sampling import check_denoising
from jdllm.decoding.prefilling import Prefilling
from jdllm.decoding.rules import acceptance_of, segment_row, step_table
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.schedule import StepTable, quotas
from jdllm.decoding.transfer.quota import QUOTA
from jdllm.errors import RequestError
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.config import ModelConfig
from jdllm.planning.prefilling import request_rows, rows_behind
from jdllm.prefilling.chunks import Chunk, cut
from jdllm.prefilling.layout import Layout
from jdllm.prefilling.prefilled import Prefilled
from jdllm.serving.request import Request
from jdllm.serving.spec import Block, RequestSpec, check_stops, checked_ids, mask_id_of


class LongContext(NamedTuple):
    """A question over a context, as int32 ids.

    - `instruction`: stands before every chunk; may be empty.
    - `context`: ids that are cut into chunks; may be empty.
    - `query`: stands before the answer.
    - `scoring_query`: what chunks are scored with, usually the query.
    """

    instruction: np.ndarray
    context: np.ndarray
    query: np.ndarray
    scoring_query: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class LongSpec(RequestSpec):
    """What a request over a long context asks for. Its sequence is the query and the answer's masks.

    - `long`: the question; `chunks`: its context, cut.
    - `prefilling`: how it is prepared.
    """

    long: LongContext
    chunks: tuple[Chunk, ...]
    prefilling: Prefilling

    @property
    def cached(self) -> bool:
        return True

    @property
    def forces_first(self) -> bool:
        return self.shifted

    @property
    def kept_chunks(self) -> int:
        """How many chunks will be kept."""
        return self.prefilling.kept_of(len(self.chunks))

    @property
    def behind(self) -> int:
        """Rows behind each chunk where it is scored; without a shift a mask stands in for each token too."""
        return rows_behind(self.prefilling, len(self.long.scoring_query), self.shifted)

    @property
    def rows(self) -> int:
        """Packed rows of its largest evaluation; chunks are scored as many at a time as fit."""
        lengths = sorted((len(chunk.tokens) for chunk in self.chunks), reverse=True)[: self.kept_chunks]
        instruction, query = len(self.long.instruction), len(self.long.scoring_query)
        return request_rows(
            self.prefilling, instruction, lengths, query, len(self.tokens), shifted=self.shifted
        )

    @property
    def positions(self) -> int:
        length, cut = self.prefilling.chunk_length, self.prefilling
        spans = {"reuse": 1, "continuous": self.kept_chunks, "absolute": len(self.chunks)}
        chunks = spans[cut.chunk_positions]
        after = {"after_window": 1, "after_chunks": self.kept_chunks, "after_cache": chunks}
        return (
            len(self.long.instruction) + max(chunks, after[cut.query_positions]) * length + len(self.tokens)
        )

    @property
    def stored_rows(self) -> int:
        lengths = sorted((len(chunk.tokens) for chunk in self.chunks), reverse=True)[: self.kept_chunks]
        most = self.prefilling.tokens_kept or self.prefilling.chunk_length
        parts = [len(self.long.instruction), *(min(n, most) for n in lengths), len(self.long.query)]
        masks, length = len(self.tokens) - len(self.long.query), self.blocks[0].stop - self.blocks[0].start
        parts += [min(length, masks - at) for at in range(0, masks, length)]  # beyond `max_tokens` too
        return PAGE_ROWS * sum(_pages(rows) for rows in parts)


def long_spec(
    long: LongContext,
    sampling: SamplingParams,
    config: ModelConfig,
    bos_id: int | None,
    decode: Decode | None = None,
) -> LongSpec:
    """A request that answers a question over a long context.

    Arguments:
    - `sampling`: with `prefilling`; `gen_length` masks are filled block by block.
    - `bos_id`: of the tokenizer, if `prefilling` names none; the id of the configuration comes last.
    - `decode`: ids to text, for stop strings.

    Raises `RequestError` for an empty query or one beyond the positions of the model, ids outside the
    vocabulary, mask ids, chunks that begin with a token of which no id is known, and what the model cannot
    do.
    """
    prefilling = sampling.prefilling
    if prefilling is None:
        raise RequestError(
            "a long prompt needs sampling with prefilling: name a preset, as prefilling='dream'"
        )
    check_denoising(sampling)
    check_stops(sampling, config, decode)
    if config.attention != "full":
        raise RequestError(f"prefilling needs a diffusion model; this one's attention is {config.attention}")
    if not config.logits_shift and prefilling.score_mask not in ("causal", "full"):
        raise RequestError(
            f"prefilling: score_mask {prefilling.score_mask!r} needs a model with shifted logits (Dream):"
            " others score each token by a mask in its place, which nothing before may see, as with"
            " 'causal' or 'full'"
        )
    mask_id, limit = mask_id_of(config), config.rope.effective_context(config.max_positions)
    if len(long.query) > limit:
        raise RequestError(
            f"the query has {len(long.query)} tokens, and the model {limit} positions: put what is long into"
            " the context"
        )
    long = LongContext(*(_part(name, ids, config, mask_id) for name, ids in long._asdict().items()))
    known = prefilling.bos_id, bos_id, config.bos_id
    bos = _checked_bos(known, config, mask_id) if prefilling.chunk_bos else None
    chunks = cut(long.context, prefilling.chunk_length, bos, from_tail=prefilling.split_from_tail)
    block_length = min(sampling.block_length or sampling.gen_length, sampling.gen_length)
    if prefilling.draft_length > block_length and prefilling.draft_rounds is prefilling.draft_steps is None:
        raise RequestError(
            f"prefilling: a draft of {prefilling.draft_length} tokens is filled in one block, and"
            f" block_length is {block_length}: shorten the draft, or give it rounds"
        )
    return _made(long, tuple(chunks), sampling, prefilling, config, block_length, decode)


def _made(
    long: LongContext,
    chunks: tuple[Chunk, ...],
    sampling: SamplingParams,
    prefilling: Prefilling,
    config: ModelConfig,
    block_length: int,
    decode: Decode | None,
) -> LongSpec:
    start, gen_length = len(long.query), sampling.gen_length
    stop = start + gen_length
    bounds = range(start, start + (sampling.max_tokens or gen_length), block_length)
    blocks = tuple(_block(at, min(at + block_length, stop), sampling, gen_length, config) for at in bounds)
    tokens = np.concatenate([long.query, np.full(gen_length, mask_id_of(config), np.int32)])
    tokens.setflags(write=False)
    return LongSpec(
        prompt=np.concatenate([long.instruction, long.context, long.query]),
        tokens=tokens,
        blocks=blocks,
        returned=slice(start, start + min(sampling.max_tokens or gen_length, gen_length)),
        sampling=sampling,
        mask_id=mask_id_of(config),
        shifted=config.logits_shift,
        stop_ids=(*config.stop_ids, *sampling.stop_token_ids),
        decode=decode,
        segment=segment_row(sampling, config),
        long=long,
        chunks=chunks,
        prefilling=prefilling,
    )


def _block(start: int, stop: int, sampling: SamplingParams, gen_length: int, config: ModelConfig) -> Block:
    """A block whose first token, with shifted logits, takes a step of its own."""
    masks = stop - start
    steps = max(1, masks * (sampling.steps or gen_length) // gen_length)
    if not config.logits_shift:
        return Block(start, stop, masks, step_table(sampling, masks, steps, gen_length))
    if masks > 1 and steps < 2 and acceptance_of(sampling) is QUOTA:
        raise RequestError(
            f"{sampling.steps} steps for {gen_length} tokens leave a block of {masks} less than two steps, of"
            " which the first commits one token: give more steps"
        )
    if masks == 1:
        return Block(start, stop, masks, quotas(np.ones(1, np.int32)))
    rest = step_table(sampling, masks - 1, steps - 1, gen_length)
    table = StepTable(np.insert(rest.quota, 0, 1), np.insert(rest.fraction, 0, 0))
    return Block(start, stop, masks, table)


def _checked_bos(known: Sequence[int | None], config: ModelConfig, mask_id: int) -> int:
    """The first id that is known of the token that begins chunks."""
    bos = next((i for i in known if i is not None), None)
    if bos is None:
        raise RequestError(
            "the model has no beginning-of-sequence token, with which chunks begin: name one, as"
            " prefilling=Prefilling(bos_id=...), or do without, as prefilling=Prefilling(chunk_bos=False)"
        )
    if not 0 <= bos < config.vocab_size:
        raise RequestError(
            f"bos_id {bos}, with which chunks begin, is outside the vocabulary (0 to {config.vocab_size - 1})"
        )
    if bos == mask_id:
        raise RequestError(f"bos_id {bos}, with which chunks begin, is the mask id {mask_id}: name another")
    return bos


def _part(name: str, ids: np.ndarray, config: ModelConfig, mask_id: int) -> np.ndarray:
    if not len(ids):
        if name in ("query", "scoring_query"):
            raise RequestError("the query of a long prompt is empty: give at least one token")
        return np.zeros(0, np.int32)
    ids = checked_ids(ids, config)
    masks = np.flatnonzero(ids == mask_id)
    if len(masks):
        raise RequestError(f"the {name} has the mask id {mask_id} at position {masks[0]}: remove it")
    return ids


def _pages(rows: int) -> int:
    return -(-rows // PAGE_ROWS)


class LongRequest(Request):
    """The state of a request over a long context.

    - `layout`: its sequence, once chunks have been selected.
    - `prefilled`: results of the stages so far.
    - `opened`: the block whose steps may run: the stages before it are done.
    """

    prefilled: Prefilled

    def __init__(self, spec: LongSpec, id: int = 0):
        super().__init__(spec, id)
        self.long_spec = spec
        self.begin_again()

    def begin_again(self) -> None:
        """Nothing is prepared yet."""
        self.layout: Layout | None = None
        self.prefilled = Prefilled()
        self.opened: int | None = None

    @property
    def phase(self) -> Phase:
        return Phase.REUSE

    @property
    def prepared(self) -> bool:
        """Whether the steps of the current block may run."""
        return self.opened == self._block

    @property
    def block_number(self) -> int:
        return self._block

    @property
    def reuse_steps(self) -> int:
        return self.steps_left

    def sequences(self) -> Iterator[np.ndarray]:
        yield self.tokens
        for chunk in self.long_spec.chunks:
            yield np.concatenate([self.long_spec.long.instruction, chunk.tokens, self.tokens])

    def positions(self, rows: np.ndarray) -> np.ndarray:
        assert self.layout is not None
        return self.layout.query_start + rows

    def page_of_part(self, part: int) -> int:
        """The first of the request's pages that hold a part."""
        assert self.layout is not None
        return sum(_pages(rows) for rows in self.layout.part_rows[:part])

    def open(self, block: int) -> None:
        """Let the steps of a block run: its rows are evaluated, and all others are read."""
        assert self.layout is not None
        self.opened = block
        self.forwarded = np.arange(self.blocks[block].start, self.blocks[block].stop)
        self.stored = self.live_rows(
            [i for i in range(len(self.layout.part_rows)) if i != self.layout.block_part(block)]
        )

    def live_rows(self, parts: Sequence[int]) -> np.ndarray:
        """How many rows of each of its pages are live, where these parts are."""
        assert self.layout is not None
        wanted, live = set(parts), []
        for part, rows in enumerate(self.layout.part_rows):
            valid = np.full(_pages(rows), PAGE_ROWS, np.int32)
            valid[-1:] -= len(valid) * PAGE_ROWS - rows
            live.append(valid if part in wanted else np.zeros_like(valid))
        return np.concatenate(live)

    def go_back(self) -> None:
        """Go back to the beginning of the request: its stored keys are lost."""
        super().go_back()
        self.begin_again()
