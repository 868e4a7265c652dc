"""Chunks of contexts whose keys stay in the KV pool when a request has ended, for the next question."""

import hashlib
import itertools
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from jdllm.serving.pool.page_book import PageBook


class StoredChunk(NamedTuple):
    """The content of a key.

    - `owner`: who holds its pages in the pool; no request has such an id.
    - `rows`: how many rows it has.
    """

    owner: int
    rows: int


class StoredChunks:
    """Rows of the KV pool that belong to contents instead of requests.

    They take pages that no request needs, and give them up, least recently used first, as soon as one does.
    The pool is a value: what changes it returns another.

    - `stored`: the chunks by key, the least recently used first.
    - `changes`: how often keys came or went.
    """

    def __init__(self):
        self.changes = 0
        self.stored: OrderedDict[bytes, StoredChunk] = OrderedDict()
        self._owners = itertools.count(-2, -1)

    def pages(self, pool: PageBook) -> int:
        """How many pages of a pool they hold; any thread may ask."""
        return sum(len(pool.pages_of(owner)) for owner in pool.owned if owner < 0)

    def __contains__(self, key: bytes) -> bool:
        """Whether something is stored under a key, which is not used by this."""
        return key in self.stored

    def find(self, key: bytes) -> StoredChunk | None:
        """The content of a key; counts as a use."""
        if key not in self.stored:
            return None
        self.stored.move_to_end(key)
        return self.stored[key]

    def add(self, pool: PageBook, key: bytes, rows: int) -> tuple[PageBook, StoredChunk]:
        """Take pages for so many rows, which `make_room` has made, under a key that has none."""
        chunk = StoredChunk(next(self._owners), rows)
        pool = pool.allocate(chunk.owner, rows)
        self.stored[key] = chunk
        self.changes += 1
        return pool, chunk

    def make_room(self, pool: PageBook, pages: int) -> PageBook:
        """Give up the least recently used contents until so many pages are free, or none is left."""
        while self.stored and pool.free_pages < pages:
            pool = pool.release(self.stored.popitem(last=False)[1].owner)
            self.changes += 1
        return pool

    def clear(self, pool: PageBook) -> PageBook:
        """Give up everything."""
        return self.make_room(pool, pool.pages)


def content_key(*parts: np.ndarray | str) -> bytes:
    """A key for contents: for arrays of ids and texts, in order."""
    digest = hashlib.blake2b(digest_size=24)
    for part in parts:
        content = part.encode() if isinstance(part, str) else np.ascontiguousarray(part, np.int32).tobytes()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()
