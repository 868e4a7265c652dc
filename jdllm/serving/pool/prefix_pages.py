"""Full pages of causal requests that stay in the KV pool when they have ended, for those that begin alike."""

import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterator

import numpy as np
from jaxtyping import Int

from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.pool.stored_chunks import content_key

_START = b""
"""The key of the page before the first one."""


class PrefixPages:
    """Pages of the KV pool that are stored under their tokens and all tokens before them.

    Where a page is stored, so are all before it. Pages that no running request reads are given up, least
    recently used first, as soon as others are needed; a page never outlives one before it. An operation costs
    as much as the pages of its request, and what the pool's operations cost.

    The pool is a value: what changes it returns another. Requests that `take` admits leave by `give_back`.
    """

    def __init__(self):
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._readers: dict[int, int] = {}
        self._unread: OrderedDict[int, None] = OrderedDict()  # all stored without readers, oldest use first
        self._storing: set[int] = set()

    @property
    def reclaimable(self) -> int:
        """How many stored pages no request reads; any thread may ask."""
        return len(self._unread)

    @staticmethod
    def keys(tokens: Int[np.ndarray, " tokens"], page_rows: int = PAGE_ROWS) -> list[bytes]:
        """Keys of full pages: each key stands for the tokens of its page and of all pages before it."""
        return list(_chain(_START, tokens, page_rows))

    def take(
        self,
        pool: PageBook,
        request: int,
        tokens: Int[np.ndarray, " tokens"],
        rows: int,
        content: bytes = _START,
    ) -> tuple[PageBook, int]:
        """Give `request` its pages: pages stored for the longest beginning of its tokens, then free pages.

        Arguments:
        - `tokens`: what it evaluates first; of the last one nothing is reused.
        - `rows`: how many rows it needs in all.
        - `content`: what the rows depend on beside their tokens, of whole numbers of 32 bits.

        Other stored pages are given up for the free ones. Returns the pool, and how many rows are there
        already. Raises `KvPoolError` and changes nothing where too few pages can be found, and where the
        request is in the pool already.
        """
        found = self._find(content, tokens[: min(len(tokens) - 1, rows)], pool.page_rows)
        needed = pool.pages_for(rows) - len(found) - pool.free_pages
        oldest = self._oldest(needed, beside=set(found))
        pool = pool.discard(oldest).allocate(request, rows, kept=found)
        self._forget(oldest)
        for page in found:
            self._readers[page] = self._readers.get(page, 0) + 1
            self._unread.pop(page, None)
        self._storing.add(request)
        return pool, len(found) * pool.page_rows

    def give_back(
        self,
        pool: PageBook,
        request: int,
        tokens: Int[np.ndarray, " tokens"],
        computed: int,
        content: bytes = _START,
    ) -> PageBook:
        """Take the pages of `request`, which ends: full ones are stored, where none is under the same key.

        Arguments:
        - `tokens`: of its rows from the first on, those that it was admitted with and what followed.
        - `computed`: how many of its first rows have been written; with 0, no page of its own is stored.
        - `content`: what the rows depend on beside their tokens, as `take` had it.

        Raises `KvPoolError` where it is not in the pool.
        """
        pages = pool.pages_of(request).tolist()
        shared = [page for page in pages if page in self._readers]
        stored = list(shared)
        if request in self._storing:
            before = self._keys[shared[-1]] if shared else content
            start = len(shared) * pool.page_rows
            keys = _chain(before, tokens[start : max(computed, start)], pool.page_rows)
            stored += [self._store(*own) for own in zip(keys, pages[len(shared) :], strict=False)]
            self._storing.remove(request)
        forgotten = [page for page in shared if self._leave(page) and page not in self._keys]
        keep = set(stored[len(shared) :]).intersection(pages)
        for page in reversed(stored):
            if page in self._keys and page not in self._readers:
                self._unread[page] = None
                self._unread.move_to_end(page)
        return pool.release(request, keep).discard(forgotten)

    def make_room(self, pool: PageBook, pages: int) -> PageBook:
        """Give up the least recently used contents until so many pages are free, or only pages with readers
        are stored."""
        oldest = self._oldest(pages - pool.free_pages)
        self._forget(oldest)
        return pool.discard(oldest)

    def clear(self, pool: PageBook) -> PageBook:
        """Forget all contents, of running requests too: nothing of them will be stored.

        Pages that are being read become free with their last reader.
        """
        unread = list(self._unread)
        for contents in (self._pages, self._keys, self._unread, self._storing):
            contents.clear()
        return pool.discard(unread)

    def _find(self, content: bytes, tokens: Int[np.ndarray, " tokens"], page_rows: int) -> list[int]:
        """The pages that are stored for the longest beginning of `tokens`."""
        keys = _chain(content, tokens, page_rows)
        return [self._pages[key] for key in itertools.takewhile(self._pages.__contains__, keys)]

    def _store(self, key: bytes, page: int) -> int:
        """The page that is stored under `key`: `page`, where there was none."""
        if key not in self._pages:
            self._pages[key], self._keys[page] = page, key
        return self._pages[key]

    def _leave(self, page: int) -> bool:
        """Let one reader of a page go; whether it was the last one."""
        self._readers[page] -= 1
        if self._readers[page]:
            return False
        del self._readers[page]
        return True

    def _oldest(self, count: int, beside: Collection[int] = ()) -> list[int]:
        """Up to `count` pages without readers that were used least recently, none of `beside` among them."""
        others = (page for page in self._unread if page not in beside)
        return list(itertools.islice(others, max(count, 0)))

    def _forget(self, pages: Collection[int]) -> None:
        for page in pages:
            del self._unread[page]
            del self._pages[self._keys.pop(page)]


def _chain(before: bytes, tokens: Int[np.ndarray, " tokens"], page_rows: int) -> Iterator[bytes]:
    """The keys of the full pages of `tokens`, which follow a page with the key `before`."""
    for end in range(page_rows, len(tokens) + 1, page_rows):
        before = content_key(np.frombuffer(before, np.int32), tokens[end - page_rows : end])
        yield before
