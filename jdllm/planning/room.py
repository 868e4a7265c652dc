"""Room for a request with a cache: whether a device has it, and which options would make it."""

import bisect
import dataclasses
from collections.abc import Mapping

from jdllm.planning.buckets import row_bucket
from jdllm.planning.ladder import DEFAULT_ROWS
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
        pages = 1 + pages_of(self.stored)
        if sharing.left(self.rows) < pages * sharing.page_bytes or not sharing.pool_fits:
            return False
        shares = sharing.shares
        rows = self.rows if self.rows <= shares.rows else row_bucket(self.rows)
        return pages <= shares.pages and rows <= shares.max_refresh

    def options(self, sharing: Sharing) -> Options:
        """The options that make the room on a device that has none as it is shared out; the one that costs
        least, and more memory where nothing else helps."""
        pages = 1 + pages_of(self.stored)
        pool = None if sharing.asked_pages is None else pages
        wide = dataclasses.replace(sharing, context=max(self.rows, sharing.context or 0))
        tried = [
            (dataclasses.replace(sharing, asked_pages=pool), {"kv_pool": _size(pages * sharing.page_bytes)}),
            (wide, {"max_context": self.rows}),
            (
                dataclasses.replace(wide, asked_rows=min(self.rows, sharing.rows)),
                {"max_context": self.rows, "max_num_batched_tokens": min(self.rows, sharing.rows)},
            ),
        ]
        for changed, options in tried:
            if self.is_in(changed):
                return options
        enough = dataclasses.replace(wide, asked_pages=pool)
        kv_pool = {} if pool is None else {"kv_pool": _size(pages * sharing.page_bytes)}
        return {"memory": _size(self.least_memory(enough)), "max_context": self.rows, **kv_pool}

    def least_memory(self, sharing: Sharing) -> int:
        """The least budget of the device, in whole MiB, that has the room if it is shared out so."""

        def enough(mib: int) -> bool:
            budget = dataclasses.replace(sharing.budget, device=mib * _MIB)
            return self.is_in(dataclasses.replace(sharing, budget=budget))

        rows = max(row_bucket(self.rows), sharing.asked_rows or DEFAULT_ROWS[-1])
        pool = 2 * (1 + pages_of(max(self.stored, rows))) * sharing.page_bytes
        most = sharing.budget.overhead + sharing.weights + sharing.needs.whole_with_margin(rows) + pool
        return _MIB * bisect.bisect_left(range(1 + most // _MIB), True, key=enough)


def _size(count: int) -> str:
    """A number of bytes as an option has it, none of them lost."""
    return f"{count // _MIB}MiB" if count % _MIB == 0 else str(count)
