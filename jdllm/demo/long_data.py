"""Training batches of the retrieval model: its examples lie as the stages of Prefilling-dLLM lay them out."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt16

from jdllm.decoding.prefilling import Prefilling, ScoreMask
from jdllm.demo.data import Asked
from jdllm.demo.long_tasks import ABSENT, INSTRUCTION, LONG_TASKS, Haystack, is_whole, long_stream
from jdllm.demo.tasks import GEN_LENGTH, Split
from jdllm.demo.tokenizer import BOS, EOS, MASK, plain_ids
from jdllm.prefilling.chunks import cut
from jdllm.prefilling.layout import KeptChunk, Layout
from jdllm.prefilling.score import behind, scoring_of
from jdllm.prefilling.segments import Ints, Segment

LONGEST_QUERY = 40
"""Characters that suffice for every question."""

MAX_POSITIONS = 8192
"""That the configuration of the model states; the longest bucket has half of them."""

CHUNK_LENGTHS = (64, 128, 256, 512)
_SHORTEST_CHUNK = 48

_INSTRUCTED = 0.5
_PLAIN = 0.25
_PIECE = 0.5
_SCORING_TOLD, _ANSWERING_TOLD = 0.6, 0.9
_HELD_OUT_CONTEXTS = (256, 1024)


@dataclasses.dataclass(frozen=True)
class LongBucket:
    """One part of every training step: `batch` examples of `length` rows.

    - `scoring`: whether these score a query behind one chunk, of which all tokens are masked, or answer one
      from several.
    """

    length: int
    batch: int
    scoring: bool


RETRIEVAL_BUCKETS: tuple[LongBucket, ...] = (
    LongBucket(256, 64, scoring=True),
    LongBucket(384, 48, scoring=True),
    LongBucket(640, 12, scoring=True),
    LongBucket(192, 64, scoring=False),
    LongBucket(384, 32, scoring=False),
    LongBucket(640, 16, scoring=False),
    LongBucket(1152, 12, scoring=False),
    LongBucket(2176, 8, scoring=False),
    LongBucket(4352, 4, scoring=False),
)
"""From a single short chunk to 16 chunks of 256 tokens."""


class Example(NamedTuple):
    """The rows of one example.

    - `rows`: tokens, with those to predict in the place of masks, positions, and what each row sees.
    - `prompt_length`: rows before those that are predicted.
    """

    rows: Segment
    prompt_length: int


class LongBatches(NamedTuple):
    """Several training steps; rows and examples of all buckets lie one after another, bucket by bucket.

    - `tokens`, `positions`: of every row; the rows of the response hold the ids to predict.
    - `ends`: a row sees itself and the rows of its example before this one.
    - `prompt_length`: rows before the response; `total_length`: with it; what follows is padding.
    """

    tokens: UInt16[np.ndarray, "steps rows"]
    positions: UInt16[np.ndarray, "steps rows"]
    ends: UInt16[np.ndarray, "steps rows"]
    prompt_length: UInt16[np.ndarray, "steps examples"]
    total_length: UInt16[np.ndarray, "steps examples"]


def draw_scoring(rng: np.random.Generator, task: str, length: int, split: Split = "train") -> Example:
    """A query behind one chunk, each token predicted from the rows before it, at most `length` rows.

    Half the queries are a piece of the chunk, from anywhere: to copy is what the score of a chunk rests on,
    and questions alone, of which each has few tokens that a chunk foretells, teach it slowly. The chunk
    answers most of the others.
    """
    prefix = _prefix(rng)
    room = length - len(prefix) - 2 * LONGEST_QUERY
    chunk_length = _chunk_length(rng, room)
    size = chunk_length if rng.random() < 0.8 else int(rng.integers(_SHORTEST_CHUNK, chunk_length + 1))
    haystack = _text(rng, task, size, split, chunk_length)
    if rng.random() < _PIECE:
        start = int(rng.integers(size - LONGEST_QUERY))
        query = haystack.text[start : start + LONGEST_QUERY]
    else:
        query, _, _ = _asked(rng, haystack, chunk_length, _SCORING_TOLD)
    [chunk] = cut(_ids(haystack.text), chunk_length, BOS)
    mask: ScoreMask = "causal" if rng.random() < 0.5 else "full"
    scored = scoring_of(prefix, chunk.tokens, behind(_ids(query), _ids(""), MASK), mask, MASK, shifted=False)
    tokens = scored.segment.tokens.copy()
    tokens[scored.sources] = scored.targets
    return Example(scored.segment._replace(tokens=tokens), len(tokens) - len(scored.targets))


def draw_answering(rng: np.random.Generator, task: str, length: int, split: Split = "train") -> Example:
    """A query behind some chunks of a text, or behind a whole one, with its answer; at most `length` rows."""
    prefix = _prefix(rng)
    room = length - len(prefix) - LONGEST_QUERY - GEN_LENGTH
    if rng.random() < _PLAIN:
        size = room if rng.random() < 0.5 else int(rng.integers(_SHORTEST_CHUNK, room + 1))
        haystack = _text(rng, task, size, split, size + 1)
        query, answer, _ = _asked(rng, haystack, size + 1, _ANSWERING_TOLD)
        kept = [KeptChunk(0, _ids(haystack.text), np.arange(size))]
        return _answering(Prefilling(chunk_length=size), prefix, kept, query, answer)
    chunk_length = _chunk_length(rng, room)
    most = room // chunk_length
    count = most if rng.random() < 0.5 else int(rng.integers(1, most + 1))
    left = int(rng.integers(4))
    short = 0 if rng.random() < 0.5 else int(rng.integers(chunk_length))
    size = max((count + left) * chunk_length - short, _SHORTEST_CHUNK)
    haystack = _text(rng, task, size, split, chunk_length)
    query, answer, wanted = _asked(rng, haystack, chunk_length, _ANSWERING_TOLD)
    chunks = cut(_ids(haystack.text), chunk_length, BOS)
    others = [i for i in rng.permutation(len(chunks)).tolist() if i != wanted]
    first = [] if wanted is None else [wanted]
    kept = [
        KeptChunk(i, chunks[i].tokens, np.arange(len(chunks[i].tokens)))
        for i in sorted((first + others)[:count])
    ]
    after = "after_chunks" if rng.random() < 0.75 else "after_cache"
    return _answering(
        Prefilling(chunk_length=chunk_length, query_positions=after), prefix, kept, query, answer
    )


def _answering(
    prefilling: Prefilling, prefix: Ints, kept: Sequence[KeptChunk], query: str, answer: str
) -> Example:
    layout = Layout(prefilling, prefix, tuple(kept), _ids(query), GEN_LENGTH, GEN_LENGTH)
    response = np.full(GEN_LENGTH, EOS)
    response[: len(answer)] = _ids(answer)
    tokens = np.concatenate([prefix, *(chunk.tokens for chunk in kept), layout.query, response])
    places = [layout.kept_positions(place) for place in range(len(kept))]
    behind_chunks = layout.query_start + np.arange(len(layout.query) + GEN_LENGTH)
    positions = np.concatenate([np.arange(len(prefix)), *places, behind_chunks])
    rows = Segment.of(tokens, np.full(len(tokens), len(tokens)), positions)
    return Example(rows, len(tokens) - GEN_LENGTH)


def _prefix(rng: np.random.Generator) -> Ints:
    return _ids(INSTRUCTION if rng.random() < _INSTRUCTED else "")


def _chunk_length(rng: np.random.Generator, room: int) -> int:
    """Half the lengths are the usual ones, the longest of these most often."""
    fitting = [length for length in CHUNK_LENGTHS if length <= room]
    if rng.random() < 0.5:
        return fitting[-1 - min(int(rng.geometric(0.5)) - 1, len(fitting) - 1)]
    return int(rng.integers(_SHORTEST_CHUNK, min(room, CHUNK_LENGTHS[-1]) + 1))


def _text(rng: np.random.Generator, task: str, length: int, split: Split, chunk_length: int) -> Haystack:
    """A text that begins with a whole fact or sentence or inside of one, and has a fact whole in a chunk."""
    while True:
        start = 0 if rng.random() < 0.5 else int(rng.integers(LONGEST_QUERY))
        text = next(long_stream(LONG_TASKS[task], split, rng, start + length)).crop(start, start + length)
        if any(is_whole(fact, chunk_length) for fact in text.facts):
            return text


def _asked(
    rng: np.random.Generator, haystack: Haystack, chunk_length: int, told: float
) -> tuple[str, str, int | None]:
    """A question, its answer, and the chunk that answers it, which there is with probability `told`."""
    if rng.random() >= told:
        return haystack.absent, ABSENT, None
    facts = [fact for fact in haystack.facts if is_whole(fact, chunk_length)]
    fact = facts[int(rng.integers(len(facts)))]
    return fact.query, fact.answer, fact.start // chunk_length


def _ids(text: str) -> Ints:
    return np.array(plain_ids(text), np.int32)


def make_long_batches(buckets: tuple[LongBucket, ...], steps: int, seed: int, index: int) -> LongBatches:
    """Draw the training examples of `steps` steps; (seed, index) determines them."""
    rng = np.random.default_rng([seed, index])
    parts = [_bucket_batches(bucket, steps, rng) for bucket in buckets]
    return LongBatches(*(np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True)))


def _bucket_batches(bucket: LongBucket, steps: int, rng: np.random.Generator) -> LongBatches:
    count, names = steps * bucket.batch, list(LONG_TASKS)
    draw = draw_scoring if bucket.scoring else draw_answering
    rows = np.zeros((3, count, bucket.length), np.uint16)
    rows[0] = EOS
    lengths = np.empty((2, count), np.uint16)
    for i, task in enumerate(rng.integers(len(names), size=count).tolist()):
        example, prompt_length = draw(rng, names[task], bucket.length)
        rows[:, i, : example.size] = example.tokens, example.positions, example.k_end
        lengths[:, i] = prompt_length, example.size
    tokens, positions, ends = rows.reshape(3, steps, -1)
    prompt_length, total_length = lengths.reshape(2, steps, bucket.batch)
    return LongBatches(tokens, positions, ends, prompt_length, total_length)


def held_out(count: int, seed: int) -> dict[str, list[Asked]]:
    """Questions over chunks of texts that training never sees, `count` of each task and length."""
    rng = np.random.default_rng(seed)
    chunk_length = _HELD_OUT_CONTEXTS[0]
    asked: dict[str, list[Asked]] = {}
    for task, length in itertools.product(LONG_TASKS, _HELD_OUT_CONTEXTS):
        for haystack in itertools.islice(long_stream(LONG_TASKS[task], "test", rng, length), count):
            query, answer, _ = _asked(rng, haystack, chunk_length, 1.0)
            chunks = [chunk.tokens for chunk in cut(_ids(haystack.text), chunk_length, BOS)]
            prompt = np.concatenate([_ids(INSTRUCTION), *chunks, _ids(query)]).tolist()
            asked.setdefault(f"{task} {length}", []).append(Asked(prompt, answer))
    return asked
