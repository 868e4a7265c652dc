"""The KV pool of an engine: its pages on the host, its arrays on the device."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Int

from jdllm.compiling.executables import Executable
from jdllm.execution.paged.pool import PAGE_ROWS, KvArrays, empty_pool
from jdllm.models.config import ModelConfig
from jdllm.pallas.split_attention import PageTable
from jdllm.planning.buckets import power_bucket
from jdllm.serving.pool.page_book import Live, PageBook
from jdllm.serving.pool.prefix_pages import PrefixPages
from jdllm.serving.pool.stored_chunks import StoredChunks
from jdllm.serving.request import Request

_CLEANED = 64
"""Pages that are zeroed at a time, at least."""


@functools.partial(jax.jit, donate_argnums=0)
def _zeroed(pool: KvArrays, pages: Int[np.ndarray, " pages"]) -> KvArrays:
    return jax.tree.map(lambda x: x.at[:, pages].set(0, mode="drop"), pool)


class KvPool:
    """Pages of keys and values, and who holds them.

    Arguments:
    - `config`, `dtype`: of the model.
    - `pages`: of the pool, the scratch page included, from first to last.
    - `sharding`: of keys and values, on several cards.

    It is on the device from the first part that needs it until `free`, and made again in the same shape.

    - `book`: which pages each request holds; a value, which every change replaces.
    - `chunks`, `prefixes`: contents whose pages no request holds.
    - `arrays`: those on the device, `None` while there are none.
    - `abstract`: the shapes and types of the arrays.
    """

    def __init__(self, config: ModelConfig, dtype: Any, pages: int, sharding: Sharding | None = None):
        self._config = config
        self._dtype = dtype
        self._pages = pages
        self.book = PageBook.empty(pages, PAGE_ROWS)
        self.chunks = StoredChunks()
        self.prefixes = PrefixPages()
        self.arrays: KvArrays | None = None
        self._sharding = sharding
        self.abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), jax.eval_shape(self._empty)
        )

    @property
    def free_pages(self) -> int:
        """Pages that no request holds; contents give theirs up. Any thread may ask."""
        pages = self.book
        return pages.free_pages + self.chunks.pages(pages) + self.prefixes.reclaimable

    @property
    def pages(self) -> int:
        """Pages that requests may hold in all."""
        return self._pages - 1

    @property
    def lost(self) -> bool:
        """Whether the pool was given to an executable that failed."""
        if self.arrays is None:
            return False
        try:
            jax.block_until_ready(self.arrays)
        except Exception:
            return True
        return any(x.is_deleted() for x in jax.tree.leaves(self.arrays))

    def entries(self, tiles: int) -> int:
        """Entries of the page table of so many tiles: requests of up to two tiles may fill the pool."""
        return 2 * self._pages + 4 * tiles

    def admit(self, request: Request) -> None:
        """Give `request` the pages that it may ever need; raises `KvPoolError` where they are not free.

        It may find pages that are stored for the beginning of its tokens.
        """
        rows = request.spec.stored_rows
        self.book = self.chunks.make_room(self.book, self.book.pages_for(rows))
        known = request.tokens[: request.known]
        self.book, found = self.prefixes.take(self.book, request.id, known, rows, request.content)
        request.find(found)

    def release(self, request: Request, *, keep: bool = True) -> None:
        """Take the pages of a request back.

        Arguments:
        - `keep`: its full pages of computed tokens stay for others as long as there is room.
        """
        computed = request.computed if keep else 0
        leaving = request.id, request.tokens, computed, request.content
        self.book = self.prefixes.give_back(self.book, *leaving)

    def clean(self, request: Request) -> None:
        """Zero what a request wrote, while no part runs: values that are no numbers must not be left in rows
        that are not live."""
        pages = self.book.own_pages_of(request.id)
        if self.arrays is not None and len(pages):
            size = power_bucket(len(pages), _CLEANED)
            beyond = np.full(size, self._pages, np.int32)
            beyond[: len(pages)] = pages
            self.arrays = _zeroed(self.arrays, beyond)

    def free(self) -> None:
        """Free the pool on the device: its contents are lost."""
        self.forget_contents()
        self.arrays = None

    def forget_contents(self) -> None:
        """Give up the pages of all contents: after a failure they may not have been written."""
        self.book = self.prefixes.clear(self.chunks.clear(self.book))

    def make(self) -> None:
        """Put the pool on the device now."""
        self.device()

    def pages_of(self, owner: int) -> np.ndarray:
        """The pages of a request, or of a stored chunk, in the order of its rows."""
        return self.book.pages_of(owner)

    def table_of(self, owners: Sequence[int], live: Sequence[Live]) -> PageTable:
        """What requests or stored chunks have stored, as attention reads it."""
        return self.book.page_table(owners, live, sum(len(self.pages_of(owner)) for owner in owners))

    def has_room(self, rows: Sequence[int]) -> bool:
        """Whether contents of so many rows could have pages beside the pages of requests."""
        return sum(map(self.book.pages_for, rows)) <= self.free_pages

    def store_chunks(self, chunks: Mapping[bytes, int]) -> dict[bytes, np.ndarray]:
        """Take pages for contents that are not stored yet, and of so many rows; none where there is no room.

        Pages of contents that were used less recently are given up for them.
        """
        if not self.has_room(list(chunks.values())):
            return {}
        needed = sum(map(self.book.pages_for, chunks.values()))
        self.book = self.chunks.make_room(self.book, needed)
        held = {}
        for key, rows in chunks.items():
            self.book, chunk = self.chunks.add(self.book, key, rows)
            held[key] = self.book.pages_of(chunk.owner)
        return held

    def run(self, executable: Executable, *arguments: Any, writes: bool) -> Any:
        """Call an executable with the pool as its last argument, which it gives back where it writes it."""
        out, pool = executable(*arguments, self.device())
        if writes:
            self.arrays = pool
        return out

    def device(self) -> KvArrays:
        """The arrays on the device, put there now if they are not."""
        if self.arrays is None:
            self.arrays = self._empty()
        return self.arrays

    def _empty(self) -> KvArrays:
        return empty_pool(self._config, self._pages, PAGE_ROWS, self._dtype, self._sharding)
