"""Likelihoods by blocks: masked copies of each block of an answer, behind the blocks before it."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jdllm.arrays import padded
from jdllm.decoding.head import Sources
from jdllm.decoding.likelihood import Asked, Perturbation
from jdllm.execution.two_ranges import FurtherKeys
from jdllm.models.config import ModelConfig
from jdllm.models.visibility import block_range
from jdllm.planning.buckets import row_bucket
from jdllm.planning.ladder import Entry
from jdllm.serving.packing import lay_out


class BlockQuestion(NamedTuple):
    """Masked copies of blocks of one sequence, and the masks whose tokens are asked for. A copy sees itself
    and the blocks of the sequence before it, so all copies share one evaluation of these.

    - `tokens`: int32 ids of the sequence up to the block of the last copy.
    - `starts`: the position where the block of each copy begins, rising.
    - `masked`: int32 `[copies, block_length]`.
    - `asked`: bool `[copies, block_length]`, one or more of each copy.
    - `targets`: the ids that are asked for, copy after copy.
    """

    tokens: np.ndarray
    starts: np.ndarray
    masked: np.ndarray
    asked: np.ndarray
    targets: np.ndarray

    @property
    def copies(self) -> list[np.ndarray]:
        """What is evaluated, as one sequence of rows."""
        return [np.concatenate([self.tokens, self.masked.ravel()])]

    @property
    def positions(self) -> np.ndarray:
        """The rotary position of each row."""
        each = self.starts[:, None] + np.arange(self.masked.shape[1])
        return np.concatenate([np.arange(len(self.tokens)), each.ravel()])

    def ranges(self, config: ModelConfig) -> np.ndarray:
        """Bounds `[4, rows]` of the two ranges of keys that each row sees, counted from the first row."""
        clean, (copies, length) = len(self.tokens), self.masked.shape
        own = dataclasses.replace(config, block_length=length)
        _, end = block_range(own, np.arange(clean), clean)
        first = np.repeat(clean + length * np.arange(copies), length)
        ends = np.concatenate([end, np.repeat(self.starts, length)])
        further = [np.concatenate([np.zeros(clean, int), bound]) for bound in (first, first + length)]
        return np.stack([np.zeros_like(ends), ends, *further])

    def sources(self, config: ModelConfig) -> np.ndarray:
        """The rows that predict what is asked for, counted from the first row. With shifted logits the first
        token of a block is predicted by the block before."""
        rows = len(self.tokens) + np.flatnonzero(self.asked)
        if not config.logits_shift:
            return rows
        copy, place = np.nonzero(self.asked)
        return np.where(place > 0, rows - 1, self.starts[copy] - 1)

    def sums(self, logprobs: np.ndarray) -> np.ndarray:
        """f64 `[copies]`, for each copy the sum over its masks.

        Arguments:
        - `logprobs`: of the targets.
        """
        counts = self.asked.sum(axis=1)
        return np.add.reduceat(logprobs.astype(np.float64), np.cumsum(counts) - counts)


class Draws(NamedTuple):
    """The masks that the likelihood of a block is averaged over; like ones are evaluated once.

    - `masks`: bool `[masks, answer]`, no two alike; `answer` counts the tokens of the answer in the block.
    - `chosen`: `[iterations, batch]`, which of the masks each draw has.
    - `ratio`: `[iterations, batch]`, the share that each draw masks.
    """

    masks: np.ndarray
    chosen: np.ndarray
    ratio: np.ndarray


def drawn(perturbation: Perturbation) -> Draws:
    """The masks of an estimate, each kept once."""
    masked, ratio = perturbation
    masks, chosen = np.unique(masked.reshape(-1, masked.shape[-1]), axis=0, return_inverse=True)
    return Draws(masks, chosen.reshape(ratio.shape), ratio)


class AnswerBlock(NamedTuple):
    """A block of a sequence with tokens of the answer.

    - `start`: where the block begins.
    - `tokens`: int32 `[block_length]`; behind the answer are masks.
    - `places`: positions of the answer's tokens in the block.
    - `draws`: over these.
    """

    start: int
    tokens: np.ndarray
    places: np.ndarray
    draws: Draws


class BlockPair(NamedTuple):
    """An answer behind its prompt, in blocks.

    - `tokens`: int32 ids of both.
    - `blocks`: those with tokens of the answer.
    """

    tokens: np.ndarray
    blocks: list[AnswerBlock]

    @property
    def exact(self) -> bool:
        """Whether no block has two tokens of the answer: every draw masks the same."""
        return all(len(block.places) == 1 for block in self.blocks)

    def questions(self, rows: int, mask_id: int) -> Iterator[BlockQuestion]:
        """Every block under each of its masks, in order.

        Arguments:
        - `rows`: of an evaluation. A question has no more, unless one copy and the blocks before it have:
          then as many as their bucket.
        """
        taken: list[tuple[AnswerBlock, np.ndarray]] = []
        room = 0
        for block in self.blocks:
            length = len(block.tokens)
            for mask in block.draws.masks:
                if taken and block.start + (len(taken) + 1) * length > room:
                    yield self._question(taken, mask_id)
                    taken = []
                if not taken:
                    needed = block.start + length
                    room = rows if needed <= rows else row_bucket(needed)
                taken.append((block, block.places[mask]))
        yield self._question(taken, mask_id)

    def estimates(self, sums: Iterator[float]) -> np.ndarray:
        """f64 `[iterations, batch]`, an estimate of each draw.

        Arguments:
        - `sums`: of every block under each of its masks, in order; as many as there are are taken.
        """
        parts = []
        for _, _, _, (masks, chosen, ratio) in self.blocks:
            found = np.fromiter(itertools.islice(sums, len(masks)), float, len(masks))
            parts.append(found[chosen] / ratio)
        return np.sum(parts, axis=0)

    def _question(self, taken: Sequence[tuple[AnswerBlock, np.ndarray]], mask_id: int) -> BlockQuestion:
        clean = np.stack([block.tokens for block, _ in taken])
        asked = np.zeros(clean.shape, bool)
        for own, (_, places) in zip(asked, taken, strict=True):
            own[places] = True
        starts = np.array([block.start for block, _ in taken])
        masked = np.where(asked, mask_id, clean).astype(np.int32)
        return BlockQuestion(self.tokens[: starts[-1]], starts, masked, asked, clean[asked])


def in_blocks(
    prompt: np.ndarray,
    answer: np.ndarray,
    block_length: int,
    mask_id: int,
    draws_of: Callable[[int, int], Draws],
) -> BlockPair:
    """An answer in blocks that are counted from the beginning of the prompt.

    Arguments:
    - `prompt`, `answer`: int32 ids; the answer is not empty.
    - `draws_of`: the draws of a block with so many tokens of the answer, from its number among the blocks
      that have some.
    """
    tokens = np.concatenate([prompt, answer])
    begin, stop = len(prompt) // block_length * block_length, len(tokens)
    blocks = []
    for number, start in enumerate(range(begin, stop, block_length)):
        end = min(start + block_length, stop)
        places = np.arange(max(start, len(prompt)), end) - start
        own = padded(tokens[start:end], block_length, mask_id)
        blocks.append(AnswerBlock(start, own, places, draws_of(len(places), number)))
    return BlockPair(tokens, blocks)


def blocks_laid_out(questions: Sequence[BlockQuestion], config: ModelConfig, entry: Entry) -> Asked:
    """The rows of some questions one after another, in the sizes of an entry."""
    sequences, positions = [q.copies[0] for q in questions], [q.positions for q in questions]
    tokens, rows, begins = lay_out(sequences, config, entry.rows, positions)
    ranges = np.zeros((4, entry.rows), np.int32)
    for question, begin, own in zip(questions, begins, sequences, strict=True):
        ranges[:, begin : begin + len(own)] = begin + question.ranges(config)
    sources = np.concatenate([b + q.sources(config) for q, b in zip(questions, begins, strict=True)])
    targets = np.concatenate([question.targets for question in questions])
    source, target = (padded(x.astype(np.int32), entry.head_rows) for x in (sources, targets))
    k_start, k_end, *further = ranges
    rows = rows._replace(k_start=k_start, k_end=k_end)
    return Asked(tokens, rows, FurtherKeys(*further), Sources(source, source), target)
