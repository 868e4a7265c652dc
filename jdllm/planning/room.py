"""Room for a request with a cache: whether a device has it, and which options would make it."""

import bisect
import dataclasses
from collections.abc import Callable, Mapping

from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.planning.buckets import row_bucket
from jdllm.planning.plan import row_ladder
from jdllm.planning.search import largest
from jdllm.planning.sharing import Sharing, pages_of

_MIB = 1 << 20

Options = Mapping[str, int | str]
"""Arguments of `LLM`, by name."""


@dataclasses.dataclass(frozen=True)
class Room:
    """What a request with a cache takes.

    - `rows`: packed rows of a step that evaluates everything.
    - `stored`: rows of the pool that it needs at most.
    """

    rows: int
    stored: int

    def is_in(self, sharing: Sharing) -> bool:
        """Whether a device that is shared out so has the room."""
        pages = self.pages
        if not sharing.refreshes(self.rows, pages) or not sharing.pool_fits:
            return False
        shares = sharing.shares
        rows = self.rows if self.rows <= shares.rows else row_bucket(self.rows)
        return pages <= shares.pages and rows <= shares.max_refresh

    def options(self, sharing: Sharing) -> Options:
        """The options that make the room on a device that has none as it is shared out; the one that costs
        least, and more memory where nothing else helps."""
        within = self.options_within(sharing)
        if within is not None:
            return within
        wide, pages = self._wide(sharing), self.pages
        enough = dataclasses.replace(wide, asked_pages=None if sharing.asked_pages is None else pages)
        kv_pool = {} if sharing.asked_pages is None else {"kv_pool": in_option(pages * sharing.page_bytes)}
        return {"memory": in_option(self.least_memory(enough)), "max_context": self.rows, **kv_pool}

    def options_within(self, sharing: Sharing) -> Options | None:
        """The same where the memory is enough; `None` where only more memory helps."""
        if self.is_in(sharing):
            return {}
        pages, wide = self.pages, self._wide(sharing)
        pool, context = {"kv_pool": in_option(pages * sharing.page_bytes)}, {"max_context": self.rows}
        tried: list[tuple[Sharing, Options]] = [(wide, context)]
        if sharing.asked_pages is not None:
            tried.insert(0, (dataclasses.replace(sharing, asked_pages=pages), pool))
        # A pool that is asked for has exactly as many pages: others have round numbers.
        fitting = [rows for rows in row_ladder() if rows <= sharing.rows]
        rows = largest(lambda rows: sharing.left(rows) >= pages * sharing.page_bytes, fitting)
        if rows is not None:
            small = dataclasses.replace(wide, asked_rows=rows, asked_pages=pages)
            tried.append((small, {**context, **pool, "max_num_batched_tokens": rows}))
        return next((options for changed, options in tried if self.is_in(changed)), None)

    @property
    def pages(self) -> int:
        """The least pages of a pool, the scratch page included."""
        return 1 + pages_of(self.stored)

    def _wide(self, sharing: Sharing) -> Sharing:
        """The same device, whose pool leaves room for the request."""
        return dataclasses.replace(sharing, context=max(self.rows, sharing.context or 0))

    def least_memory(self, sharing: Sharing) -> int:
        """The least budget of the device, in whole MiB, that has the room if it is shared out so."""

        def enough(mib: int) -> bool:
            budget = dataclasses.replace(sharing.budget, device=mib * _MIB)
            return self.is_in(dataclasses.replace(sharing, budget=budget))

        rows = max(row_bucket(self.rows), sharing.asked_rows or sharing.default_rows[-1])
        pool = 2 * (1 + pages_of(max(self.stored, rows))) * sharing.page_bytes
        most = sharing.budget.overhead + sharing.weights + sharing.needs.whole_with_margin(rows) + pool
        return _MIB * bisect.bisect_left(range(1 + most // _MIB), True, key=enough)


def longest_request(fits: Callable[[int], bool]) -> int:
    """The longest context that fits, in whole pages or a compiled size; 0 where none does.

    Arguments:
    - `fits`: whether a request of so many tokens has room.
    """
    most = largest(fits, row_ladder()) or 0
    return largest(fits, range(most + PAGE_ROWS, row_bucket(most + 1), PAGE_ROWS)) or most


def in_option(count: int) -> str:
    """A number of bytes as an option has it, none of them lost."""
    return f"{count // _MIB}MiB" if count % _MIB == 0 else str(count)
