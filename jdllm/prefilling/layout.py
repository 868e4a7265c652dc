"""Where instruction, chunks, query and answer are: in positions, and in parts that are stored."""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jdllm.decoding.prefilling import Prefilling

Ints = Int[np.ndarray, " length"]


class KeptChunk(NamedTuple):
    """A chunk that was selected.

    - `index`: which of the document's it is.
    - `tokens`: int32, all of them.
    - `kept`: which of them are kept, rising: one list for all, or one for each layer and key-value head.
    """

    index: int
    tokens: Ints
    kept: Int[np.ndarray, " kept"] | Int[np.ndarray, "layers kv_heads kept"]

    @property
    def per_head(self) -> bool:
        return self.kept.ndim > 1


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sequence that the answer is denoised in.

    Its parts are numbered: the instruction is 0, the chunks follow from 1 on, then the query, then each
    block. Every part is stored by itself.

    - `prefilling`: how.
    - `prefix`, `query`: int32 tokens of the instruction and of the query.
    - `chunks`: the selected chunks, in the order of the document.
    - `gen_length`, `block_length`: masks behind the query, and in a block; the last may be shorter.
    """

    prefilling: Prefilling
    prefix: Ints
    chunks: tuple[KeptChunk, ...]
    query: Ints
    gen_length: int
    block_length: int

    @property
    def query_part(self) -> int:
        return len(self.chunks) + 1

    def block_part(self, block: int) -> int:
        return self.query_part + 1 + block

    @property
    def blocks(self) -> int:
        return -(-self.gen_length // self.block_length)

    def block_slots(self, block: int) -> range:
        """The positions of a block among the positions of the answer."""
        start = block * self.block_length
        return range(start, min(start + self.block_length, self.gen_length))

    @functools.cached_property
    def part_rows(self) -> tuple[int, ...]:
        """Rows of each part."""
        chunks = [chunk.kept.shape[-1] for chunk in self.chunks]
        blocks = [len(self.block_slots(block)) for block in range(self.blocks)]
        return (len(self.prefix), *chunks, len(self.query), *blocks)

    def chunk_start(self, place: int) -> int:
        """The position of the first token of the chunk that was selected as number `place`."""
        length, rule = self.prefilling.chunk_length, self.prefilling.chunk_positions
        before = {"reuse": 0, "continuous": place, "absolute": self.chunks[place].index}[rule]
        return len(self.prefix) + before * length

    def kept_positions(self, place: int) -> Ints:
        """Positions that the stored tokens of a chunk have; where each head keeps its own they close up."""
        kept = self.chunks[place].kept
        return self.chunk_start(place) + (np.arange(kept.shape[-1]) if kept.ndim > 1 else kept)

    @functools.cached_property
    def query_start(self) -> int:
        """The position of the query, as it is stored."""
        return self._query_start([self.kept_positions(place) for place in range(len(self.chunks))])

    @functools.cached_property
    def first_query_start(self) -> int:
        """The position of the query beside whole chunks, before each head has thinned them out."""
        spans = [self.chunk_start(i) + np.arange(len(chunk.tokens)) for i, chunk in enumerate(self.chunks)]
        return self._query_start(spans)

    def _query_start(self, positions: list[Ints]) -> int:
        length, before = self.prefilling.chunk_length, len(self.prefix)
        match self.prefilling.query_positions:
            case "after_window":
                return before + length
            case "after_chunks":
                return before + len(self.chunks) * length
        return max([before, *(int(x[-1]) + 1 for x in positions)])
