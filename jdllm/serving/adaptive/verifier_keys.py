"""What a verifier has stored of requests: keys and values in pages of its own."""

from collections.abc import Sequence
from typing import NamedTuple

from jdllm.compiling.over_cards import whole_on_each
from jdllm.execution.paged.pool import PAGE_ROWS, pool_bytes
from jdllm.models.leaf import dtypes_of
from jdllm.models.weights import tree_bytes
from jdllm.planning.buckets import power_bucket
from jdllm.planning.ladder import MAX_SEGMENTS
from jdllm.serving.adaptive.verifier import Verifier
from jdllm.serving.pool.kv_pool import KvPool
from jdllm.serving.request import Request


class Spans(NamedTuple):
    """Rows of a request that the verifier has to evaluate.

    - `unread`: rows before its window that are not stored.
    - `window`: rows that predict its window, from the row before it to the row before its last draft.
    """

    unread: range
    window: range


def verifier_pages(rows: int) -> int:
    """Pages for all requests of a step of so many packed rows, the scratch page included."""
    return 1 + -(-rows // PAGE_ROWS) + MAX_SEGMENTS


def verifier_bytes(verifier: Verifier, rows: int) -> int:
    """Bytes of a verifier on the device beside steps of so many packed rows: its weights, which may be
    abstract, and what it stores."""
    return tree_bytes(verifier.params) + verifier_keys_bytes(verifier, rows)


def verifier_keys_bytes(verifier: Verifier, rows: int) -> int:
    """Bytes of what a verifier stores for steps of so many packed rows."""
    return _bytes(verifier, verifier_pages(rows))


def _bytes(verifier: Verifier, pages: int) -> int:
    return pool_bytes(verifier.config, dtypes_of(verifier.params).pool.name, pages, PAGE_ROWS)


class VerifierKeys:
    """Pages for the requests of a step, which stay theirs until others need them.

    Arguments:
    - `verifier`: the model.
    - `rows`: packed rows of a step. A longer request gets a larger pool, in which nothing is stored.

    - `pool`: on the device from the first step on.
    """

    def __init__(self, verifier: Verifier, rows: int):
        self._verifier = verifier
        self._rows = rows
        self._stored: dict[int, int] = {}
        self.pool = self._made(rows)

    @property
    def beyond_plan(self) -> int:
        """Bytes of the pool beyond the bytes of a step's rows."""
        return _bytes(self._verifier, self.pool.pages + 1 - verifier_pages(self._rows))

    def hold(self, requests: Sequence[Request]) -> list[Spans]:
        """Give each request pages for all its rows, and say which of these have to be evaluated.

        Requests of other steps lose theirs where there are too few, the least recently served first.
        """
        rows = power_bucket(sum(len(request.tokens) for request in requests), self._rows)
        if verifier_pages(rows) != self.pool.pages + 1:
            self._stored, self.pool = {}, self._made(rows)
        for request in requests:
            self._stored[request.id] = self._stored.pop(request.id, 0)
        table = self.pool.book
        for request in requests:
            if request.id in table.owned:
                continue
            needed = table.pages_for(len(request.tokens))
            while table.free_pages < needed:
                oldest = next(iter(self._stored))
                del self._stored[oldest]
                table = table.release(oldest) if oldest in table.owned else table
            table = table.allocate(request.id, len(request.tokens))
        self.pool.book = table
        return [_spans(request, self._stored[request.id]) for request in requests]

    def stored(self, requests: Sequence[Request], spans: Sequence[Spans]) -> None:
        """Note that these rows are evaluated by a step: up to the next draft that is refused they hold."""
        for request, span in zip(requests, spans, strict=True):
            self._stored[request.id] = span.window.stop

    @property
    def held(self) -> int:
        """For how many requests something is held."""
        return len(self._stored)

    def forget(self, request: int) -> None:
        """Take the pages of a request back where it holds any."""
        if self._stored.pop(request, None) is not None:
            self.pool.book = self.pool.book.release(request)

    def clear(self) -> None:
        """Give up all pages, and the pool on the device."""
        self._stored, self.pool = {}, self._made(self._rows)

    def _made(self, rows: int) -> KvPool:
        params, config = self._verifier
        return KvPool(config, dtypes_of(params).pool, verifier_pages(rows), whole_on_each(params))


def _spans(request: Request, stored: int) -> Spans:
    window = request.candidates()
    # What follows the first mask was stored with drafts that may have been refused.
    begin = max(int(window[0]) - 1, 0)
    return Spans(range(min(stored, begin), begin), range(begin, max(int(window[-1]), begin + 1)))
