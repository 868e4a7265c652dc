"""How a device is shared out between the largest step and the pool of keys and values."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from jdllm.byte_sizes import format_bytes
from jdllm.errors import DoesNotFitError
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.pallas.masked_logits import Level
from jdllm.planning.budget import Budget, MemoryBudgetError, StepRoom
from jdllm.planning.ladder import DEFAULT_ROWS
from jdllm.planning.plan import longest_fitting, refusal, row_ladder
from jdllm.planning.search import largest
from jdllm.planning.step_needs import StepNeeds, whole_bucket

_DIGITS = 4
_SHARES = (1, 2, 4)
"""What a context is divided by for the rows that a pool should hold: sparse cache policies keep a share."""

_POOL_SHARE = 0.85
"""Share of the bytes beside the weights that the default step leaves to the pool at least."""


class Shares(NamedTuple):
    """What a device is shared out to.

    - `rows`: packed rows of the largest step.
    - `pages`: of the pool, the scratch page included; 1 where there is none.
    - `max_refresh`: the longest sequence whose refreshes run beside the pool; 0 without one.
    """

    rows: int
    pages: int
    max_refresh: int


@dataclasses.dataclass(frozen=True)
class Sharing:
    """A device with the weights on it, whose rest the largest step and the pool share.

    - `needs`: what steps of the model need.
    - `budget`: what may be used, the verifier counted as overhead.
    - `weights`, `page_bytes`: bytes of the model's weights, and of a page of the pool.
    - `asked_rows`, `asked_pages`, `context`: packed rows of a step, pages of the pool, and the longest
      sequence that the pool has to leave room for, where somebody said so.
    - `default_rows`: rows of a step, of which memory chooses where nobody said so; the least first.
    """

    needs: StepNeeds
    budget: Budget
    weights: int
    page_bytes: int
    asked_rows: int | None = None
    asked_pages: int | None = None
    context: int | None = None
    default_rows: Sequence[int] = DEFAULT_ROWS

    @property
    def free(self) -> int:
        """Bytes beside the weights."""
        return self.budget.device - self.budget.overhead - self.weights

    @functools.cached_property
    def shares(self) -> Shares:
        """What steps and pool have. Whether a pool that was asked for fits is for `check_pool`."""
        rows, pages = self.rows, self.asked_pages
        if pages is None:
            rows, pages = self._share(rows)
        return Shares(rows, pages, self._longest_refresh(pages) if pages > 1 else 0)

    @property
    def rows(self) -> int:
        """The most packed rows of a step: the requested rows, or else the most of `default_rows` whose whole
        step takes no more than 15 % of the bytes beside the weights, and leaves a pool that holds as many
        rows; the least of them where none does, and for a model that is evaluated in parts."""
        if self.asked_rows is not None:
            return self.asked_rows

        def leaves_a_pool(rows: int) -> bool:
            left = self.left(rows)
            least = max(1 + pages_of(rows), self.asked_pages or 0) * self.page_bytes
            return left >= max(_POOL_SHARE * self.free, least)

        least = self.default_rows[0]
        return least if self._in_parts else largest(leaves_a_pool, self.default_rows) or least

    @property
    def _in_parts(self) -> bool:
        """Whether sequences are read in parts, so that no step is longer than `rows`."""
        return self.needs.config.in_parts

    def left(self, rows: int) -> int:
        """Bytes beside a whole step of `rows` rows; negative where it does not fit."""
        return self.free - self.needs.whole_with_margin(rows)

    def refreshes(self, rows: int, pages: int) -> bool:
        """Whether a sequence of so many rows is refreshed beside a pool of so many pages."""
        if self._in_parts:
            return self.left(rows) >= pages * self.page_bytes
        return self.needs.refresh_fits(rows, self.beside(pages))

    def beside(self, pages: int) -> StepRoom:
        """The room for a step beside a pool."""
        return self.budget.beside(self.weights + pages * self.page_bytes)

    def longest(self, pages: int) -> int:
        """The longest context whose full steps run beside a pool, whatever is sampled; 0 where none does."""
        return self.needs.longest_on_device(self.beside(pages))

    def _longest_refresh(self, pages: int) -> int:
        """The longest context that is refreshed beside a pool, in chunks where it has to be; of a model that
        is evaluated in parts, the largest part."""
        return longest_fitting(lambda rows: self.refreshes(rows, pages))

    def _share(self, most_rows: int) -> tuple[int, int]:
        """The most rows whose whole step fits beside a pool that holds as many, and the pages of that pool.

        If it can, the pool holds `context` tokens too, or else a half of them or a quarter.

        One page where no step fits so.
        """
        most = self._most_pages()

        def pages(rows: int) -> int:
            return min(most, self._pages_beside(rows))

        candidates = [*(rows for rows in row_ladder() if rows < most_rows), most_rows]
        for held in sorted({0, *(pages_of((self.context or 0) // share) for share in _SHARES)}, reverse=True):
            rows = largest(lambda rows, held=held: pages(rows) > max(held, pages_of(rows)), candidates)
            if rows is not None:
                return rows, pages(rows)
        return most_rows, 1

    def _pages_beside(self, rows: int) -> int:
        """The most pages beside a whole step, a round number."""
        return rounded(max(0, self.left(rows) // self.page_bytes))

    def _most_pages(self) -> int:
        """The most pages beside which sequences of `context` tokens run: refreshes too, where these leave a
        pool of a quarter as many rows: sparse cache policies keep a share."""
        most = max(1, (self.budget.device - self.weights) // self.page_bytes)
        if self.context is None:
            return most
        context, numbers = self.context, _round_numbers(most)
        if not self._in_parts:
            refreshed = largest(lambda pages: self.refreshes(context, pages), numbers)
            if refreshed is not None and refreshed > pages_of(context // 4):
                return refreshed
        return largest(lambda pages: self.needs.fits_on_device(context, self.beside(pages)), numbers) or 1

    @property
    def pool_fits(self) -> bool:
        """Whether a pool that was asked for fits beside a whole step."""
        pages = self.asked_pages or 1
        return pages == 1 or pages * self.page_bytes <= self.left(self.rows)

    def check_pool(self) -> None:
        """Raise `DoesNotFitError` where a pool that was asked for does not fit."""
        if not self.pool_fits:
            pool, left = (self.asked_pages or 1) * self.page_bytes, max(0, self.left(self.rows))
            raise DoesNotFitError(
                f"kv_pool is {format_bytes(pool, math.ceil)} in whole pages, and the weights, the overhead"
                f" and a step of {self.rows} rows leave {format_bytes(left, math.floor)} of the memory,"
                f" {self._memory}: lower kv_pool or max_num_batched_tokens, or raise memory"
            )

    def check_context(self) -> None:
        """Raise `DoesNotFitError` where full steps of `context` tokens do not fit beside a pool."""
        context, pages = self.context, self.asked_pages or 1
        if context is not None and context > (longest := self.longest(pages)):
            pool = format_bytes(pages * self.page_bytes, math.ceil)
            raise DoesNotFitError(
                f"max_context is {context} tokens, and beside a KV pool of {pool} the longest that fits the"
                f" memory, {self._memory}, is {longest}: lower max_context or kv_pool, or raise memory"
            )

    @property
    def _memory(self) -> str:
        return format_bytes(self.budget.device, math.floor)

    def nothing_fits(self) -> MemoryBudgetError:
        """The error for a budget in which not even the smallest step runs."""
        workload = self.needs.workload(Level.TOP)
        what = f"with memory={self._memory} a step"
        return refusal(workload, whole_bucket(1), self.beside(0), self.needs.tiers, what=what)


def pages_of(rows: int) -> int:
    """Pages that hold so many rows."""
    return -(-rows // PAGE_ROWS)


def less(budget: Budget, size: int) -> Budget:
    """A budget of whose bytes `size` are not for steps."""
    return dataclasses.replace(budget, overhead=budget.overhead + size)


def _unit(pages: int) -> int:
    """What numbers of about `pages` pages are rounded to: their highest binary digits are left."""
    return 1 << max(0, pages.bit_length() - _DIGITS)


def rounded(pages: int) -> int:
    """The number of pages, rounded down to few binary digits."""
    return pages // _unit(pages) * _unit(pages)


def _round_numbers(most: int) -> list[int]:
    """All numbers of pages from 1 to `most` that are round."""
    numbers = [1]
    while (following := numbers[-1] + _unit(numbers[-1])) <= most:
        numbers.append(following)
    return numbers
