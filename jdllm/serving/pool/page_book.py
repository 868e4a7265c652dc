"""Which pages of the KV pool belong to which request.

On the device the pool is two arrays `[layers, pages, kv_heads, page_rows, head_dim]`, rotated keys and values
of all requests. The host keeps a `PageBook`: a value, of which every operation makes another one. Row i of a
request lies in row i % page_rows of its page number i // page_rows. Pages may be kept for what they hold when
their request leaves; requests that come later may read them.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from jaxtyping import Int

from jdllm.arrays import padded
from jdllm.errors import KvPoolError
from jdllm.execution.paged.pool import SCRATCH_PAGE, check_page_rows
from jdllm.pallas.split_attention import PageTable

Live = int | np.ndarray
"""Rows of a request that are live: so many from its first on, or so many from the first of each page on."""

_WORD = 512
"""Pages in a word of a set of pages."""


@dataclasses.dataclass(frozen=True)
class PageBook:
    """The pages that each request holds, those that are kept, and those that are free.

    An operation costs as much as the pages that change hands, plus a word for each 512 pages of the pool and
    a reference for each request. Rows are counted from the first row of a request on; a request may hold no
    pages. A page is held by one request, or kept and held by any number. Everything raises `KvPoolError` for
    a negative number of rows.

    - `pages`: pages of the pool, the scratch page included.
    - `page_rows`: rows of a page, a multiple of 64.
    - `free`: a set of pages; bit i of word w is page 512 w + i.
    - `kept`: a set of pages, alike: pages that stay when the request that holds them leaves.
    - `owned`: the pages of each request in the order of its rows, as the bytes of int32.
    """

    pages: int
    page_rows: int
    free: tuple[int, ...] = dataclasses.field(repr=False)
    kept: tuple[int, ...] = dataclasses.field(repr=False)
    owned: Mapping[int, bytes] = dataclasses.field(repr=False)

    @classmethod
    def empty(cls, pages: int, page_rows: int) -> "PageBook":
        """A pool of `pages` pages, of which all but the scratch page are free.

        Raises `KvPoolError` where there is no scratch page or `page_rows` is no multiple of 64.
        """
        check_page_rows(page_rows)
        if pages < 1:
            raise KvPoolError(f"a KV pool of {pages} pages: expected at least 1, the scratch page")
        words = (0,) * -(-pages // _WORD)
        free = _with(words, range(SCRATCH_PAGE + 1, pages))
        return cls(pages, page_rows, free, words, MappingProxyType({}))

    @property
    def free_pages(self) -> int:
        """How many pages are free."""
        return sum(word.bit_count() for word in self.free)

    def pages_for(self, rows: int) -> int:
        """How many pages `rows` rows take."""
        if rows < 0:
            raise KvPoolError(f"{rows} rows of the KV pool: expected 0 or more")
        return -(-rows // self.page_rows)

    def pages_of(self, request: int) -> Int[np.ndarray, " pages"]:
        """The pages of `request` in the order of its rows, int32 and read-only.

        Raises `KvPoolError` where it was never allocated any.
        """
        if request not in self.owned:
            raise KvPoolError(f"request {request} is not in the KV pool: allocate its pages first")
        return np.frombuffer(self.owned[request], np.int32)

    def own_pages_of(self, request: int) -> Int[np.ndarray, " pages"]:
        """The pages of `request` that are not kept: nobody else reads them."""
        pages = self.pages_of(request)
        return pages[[not _has(self.kept, page) for page in pages.tolist()]]

    def allocate(self, request: int, rows: int, kept: Sequence[int] = ()) -> "PageBook":
        """Give `request` as many pages as `rows` rows take: some that are kept, then the lowest free ones.

        Arguments:
        - `kept`: the pages of its first rows, at most as many as it gets in all.

        Raises `KvPoolError` where too few are free, where one of `kept` is not kept or they are more than the
        rows take, and where the request is in the pool already.
        """
        if request in self.owned:
            raise KvPoolError(
                f"request {request} holds {len(self.pages_of(request))} pages of the KV pool already:"
                " release it first"
            )
        self._check_kept(kept)
        needed, free = self.pages_for(rows) - len(kept), self.free_pages
        if needed < 0:
            raise KvPoolError(
                f"request {request} needs {self.pages_for(rows)} pages of the KV pool for {rows} rows, and"
                f" {len(kept)} kept are given: expected at most as many"
            )
        if needed > free:
            beside = f" beside {len(kept)} kept" if kept else ""
            raise KvPoolError(
                f"request {request} needs {needed} pages of the KV pool{beside} for {rows} rows, and {free}"
                f" of {self.pages - 1} are free: wait until others are released, or use fewer rows"
            )
        taken, left = _without_lowest(self.free, needed)
        owned = {**self.owned, request: np.array([*kept, *taken], np.int32).tobytes()}
        return dataclasses.replace(self, free=left, owned=MappingProxyType(owned))

    def release(self, request: int, keep: Collection[int] = ()) -> "PageBook":
        """Free the pages of `request`, which leaves the pool, but for those that are kept.

        Arguments:
        - `keep`: pages of the request that are kept from now on.

        Raises `KvPoolError` where it is not in the pool, or one of `keep` is not among its pages.
        """
        pages = self.pages_of(request).tolist()
        if others := set(keep).difference(pages):
            raise KvPoolError(f"request {request} does not hold pages {sorted(others)} of the KV pool")
        kept = _with(self.kept, keep)
        free = _with(self.free, (page for page in pages if not _has(kept, page)))
        owned = {other: pages for other, pages in self.owned.items() if other != request}
        return dataclasses.replace(self, free=free, kept=kept, owned=MappingProxyType(owned))

    def discard(self, pages: Collection[int]) -> "PageBook":
        """Free pages that are kept and that no request holds; `KvPoolError` where one is not kept."""
        self._check_kept(pages)
        return dataclasses.replace(self, free=_with(self.free, pages), kept=_without(self.kept, pages))

    def _check_kept(self, pages: Iterable[int]) -> None:
        if others := [page for page in pages if not (0 < page < self.pages and _has(self.kept, page))]:
            raise KvPoolError(f"pages {sorted(others)} of the KV pool are not kept")

    def page_table(self, requests: Sequence[int], rows: Sequence[Live], bound: int) -> PageTable:
        """What some requests have stored, as attention reads it.

        Arguments:
        - `requests`: the requests that attend, in the order of their queries.
        - `rows`: how many rows of each are live, from its first on, at most those of its pages; or how many
          of each of its pages are, from the first of the page on.
        - `bound`: entries of the table, at least the pages with live rows.

        Returns NumPy arrays, int32: `pages` and `valid` `[bound]`, `first` `[requests + 1]`. Entries that
        nobody owns are the scratch page with no live rows.

        Raises `KvPoolError` for rows beyond a request's pages, or more entries than `bound`.
        """
        held = [self._pages_with(*live) for live in zip(requests, rows, strict=True)]
        counts = np.array([len(pages) for pages in held], np.int32)
        first = np.cumsum([0, *counts], dtype=np.int32)
        before = (np.arange(first[-1]) - np.repeat(first[:-1], counts)) * self.page_rows
        by_page = {i: live for i, live in enumerate(rows) if isinstance(live, np.ndarray)}
        total = np.array([0 if i in by_page else live for i, live in enumerate(rows)], np.int32)
        valid = np.minimum(np.repeat(total, counts) - before, self.page_rows)
        for i, live in by_page.items():
            valid[first[i] : first[i + 1]] = live[live > 0]
        return PageTable(_joined(held, bound, "pages"), _joined([valid], bound, "pages"), first)

    def _pages_with(self, request: int, rows: Live) -> Int[np.ndarray, " pages"]:
        """The pages of `request` that hold its live rows."""
        held = self.pages_of(request)
        if isinstance(rows, np.ndarray):
            return held[: len(rows)][rows > 0]
        needed = self.pages_for(rows)
        if needed > len(held):
            raise KvPoolError(
                f"request {request} holds {len(held)} pages of the KV pool, room for"
                f" {len(held) * self.page_rows} rows, not {rows}: allocate pages for all of them"
            )
        return held[:needed]


def _with(words: tuple[int, ...], pages: Iterable[int]) -> tuple[int, ...]:
    """A set of pages, and `pages` too."""
    out = list(words)
    for page in pages:
        out[page // _WORD] |= 1 << page % _WORD
    return tuple(out)


def _without(words: tuple[int, ...], pages: Iterable[int]) -> tuple[int, ...]:
    """A set of pages, and none of `pages`, which are in it."""
    out = list(words)
    for page in pages:
        out[page // _WORD] &= ~(1 << page % _WORD)
    return tuple(out)


def _has(words: tuple[int, ...], page: int) -> bool:
    """Whether a page is in a set of pages."""
    return bool(words[page // _WORD] >> page % _WORD & 1)


def _without_lowest(words: tuple[int, ...], count: int) -> tuple[list[int], tuple[int, ...]]:
    """The `count` lowest of a set of pages, and the set without them."""
    pages, out = [], list(words)
    for index, word in enumerate(words):
        while word and len(pages) < count:
            pages.append(index * _WORD + (word & -word).bit_length() - 1)
            word &= word - 1
        out[index] = word
        if len(pages) == count:
            break
    return pages, tuple(out)


def _joined(parts: Sequence[np.ndarray], bound: int, what: str) -> Int[np.ndarray, " bound"]:
    """The parts one after another as int32, then zeros; zero is the scratch page."""
    total = sum(map(len, parts))
    if total > bound:
        raise KvPoolError(f"{total} {what} of the KV pool do not fit {bound} entries: use a larger bound")
    return padded(np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32), bound)
