"""Full pages that stay in the KV pool for requests that begin alike."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jdllm.errors import KvPoolError
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.pool.prefix_pages import PrefixPages
from jdllm.serving.pool.stored_chunks import StoredChunks

ROWS = 64


def free(pool: PageBook) -> list[int]:
    """The free pages in the order in which they would be given out."""
    return pool.allocate(-1, pool.free_pages * pool.page_rows).pages_of(-1).tolist()


def text(pages: str, more: int = 0, page_rows: int = ROWS) -> np.ndarray:
    """A page for each letter, which its last token tells from others, and `more` tokens."""
    tokens = [token for letter in pages for token in (*range(page_rows - 1), 1000 + ord(letter))]
    return np.array([*tokens, *range(more)], np.int32)


class Host:
    """A pool and the pages that are stored in it, at first those of some texts from page 1 on."""

    def __init__(self, *texts: str, page_rows: int = ROWS):
        self.prefix = PrefixPages()
        self.pool = PageBook.empty(10, page_rows)
        for letters in texts:
            self.run(text(letters, page_rows=page_rows))

    def take(self, request: int, tokens: np.ndarray, rows: int | None = None) -> tuple[list[int], int]:
        """Its pages, and how many rows are reused."""
        rows = len(tokens) if rows is None else rows
        self.pool, reused = self.prefix.take(self.pool, request, tokens, rows)
        return self.pool.pages_of(request).tolist(), reused

    def end(self, request: int, tokens: np.ndarray, computed: int = 999) -> None:
        self.pool = self.prefix.give_back(self.pool, request, tokens, computed)

    def run(self, tokens: np.ndarray) -> tuple[list[int], int]:
        """A request that comes and goes; what `take` returns."""
        taken = self.take(99, tokens)
        self.end(99, tokens)
        return taken

    def make_room(self, *pages: int) -> list[list[int]]:
        """Which pages become free for each number of pages, one after another."""
        freed = []
        for count in pages:
            before = set(free(self.pool))
            self.pool = self.prefix.make_room(self.pool, count)
            freed.append(sorted(set(free(self.pool)) - before))
        return freed


NUMBERS = st.lists(st.integers(0, 2), max_size=4)


class TestKeys:
    @given(NUMBERS, NUMBERS, st.sampled_from([64, 128]), st.integers(0, 63))
    def test_equal_where_all_tokens_so_far_are(self, one: list[int], other: list[int], rows: int, more: int):
        """The number of a page changes its first token, its last one, or none."""

        def tokens(pages: list[int]) -> np.ndarray:
            out = np.arange(len(pages) * rows + more, dtype=np.int32)
            out[[i * rows + (0, rows - 1)[n - 1] for i, n in enumerate(pages) if n]] = -5
            return out

        keys = [PrefixPages.keys(tokens(pages), rows) for pages in (one, other)]
        assert [len(set(own)) for own in keys] == list(map(len, keys)) == [len(one), len(other)]
        for i, pair in enumerate(zip(*keys, strict=False), 1):
            assert (pair[0] == pair[1]) == (one[:i] == other[:i])

    def test_a_page_has_another_key_elsewhere(self):
        assert len({*PrefixPages.keys(text("aaa")), *PrefixPages.keys(text("ba"))}) == 5


class TestReuse:
    def test_shared_pages_come_first(self):
        host = Host("abc")
        assert host.take(0, text("abx", 1), 5 * ROWS) == ([1, 2, 4, 5, 6], 2 * ROWS)
        assert host.prefix.reclaimable == 1
        table = host.pool.page_table([0], [2 * ROWS + 1], 4)
        assert [x.tolist() for x in table] == [[1, 2, 4, 0], [64, 64, 1, 0], [0, 3]]

    @pytest.mark.parametrize("letters", ["", "a", "ab", "abc", "abcd", "axc", "xbc", "bc"])
    @pytest.mark.parametrize("more", [0, 1, 63])
    def test_the_longest_beginning_but_for_the_last_token(self, letters: str, more: int):
        host, tokens = Host("abc"), text(letters, more)
        pages, rows = host.take(0, tokens, len(tokens) + 1)
        reused = min(sum(letters[:i] == "abc"[:i] for i in (1, 2, 3)), max(len(tokens) - 1, 0) // ROWS)
        assert rows == reused * ROWS
        assert pages == [*range(1, reused + 1), *range(4, 5 + len(letters) - reused)]

    @pytest.mark.parametrize(("rows", "reused"), [(0, 0), (63, 0), (64, 1), (130, 2)])
    def test_no_more_than_the_rows(self, rows: int, reused: int):
        assert Host("abc").take(0, text("abc", 1), rows)[1] == reused * ROWS

    def test_larger_pages(self):
        host = Host("ab", page_rows=128)
        assert host.take(0, text("abc", page_rows=128)) == ([1, 2, 3], 256)
        host.end(0, text("abc", 127, page_rows=128))
        assert host.prefix.reclaimable == 3

    def test_a_request_goes_on_where_another_ended(self):
        host = Host()
        host.take(0, text("a", 1), 3 * ROWS)
        host.end(0, text("ab", 5))
        assert host.run(text("abc")) == ([1, 2, 3], 2 * ROWS)
        assert host.run(text("abcd")) == ([1, 2, 3, 4], 3 * ROWS)

    def test_requests_at_the_same_time_compute_their_own(self):
        host = Host()
        assert host.take(0, text("ab")) == ([1, 2], 0)
        assert host.take(1, text("abc")) == ([3, 4, 5], 0)
        host.end(0, text("ab"))
        assert host.take(2, text("abc")) == ([1, 2, 6], 2 * ROWS)
        host.end(1, text("abc"))
        assert free(host.pool) == [3, 4, 7, 8, 9]
        host.end(2, text("abc"))
        assert free(host.pool) == [3, 4, 6, 7, 8, 9]
        assert host.take(3, text("abcd")) == ([1, 2, 5, 3], 3 * ROWS)


class TestEnds:
    @pytest.mark.parametrize(("computed", "stored"), [(0, 0), (63, 0), (64, 1), (191, 2), (192, 3), (999, 3)])
    def test_full_pages_of_computed_rows_are_stored(self, computed: int, stored: int):
        host = Host()
        host.take(0, text("abc"), 5 * ROWS)
        host.end(0, text("abc", 63), computed)
        assert free(host.pool) == list(range(stored + 1, 10))
        assert host.take(1, text("abcd"))[1] == stored * ROWS

    @pytest.mark.parametrize("computed", [-1, 0, 1, 64, 128])
    def test_shared_pages_stay_stored(self, computed: int):
        host = Host("ab")
        host.take(0, text("abc", 63))
        host.end(0, text("abc", 63), computed)
        assert host.take(1, text("abc")) == ([1, 2, 3], 2 * ROWS)

    def test_the_last_reader_unpins(self):
        host = Host("abc")
        tokens = [text("ab", 1), text("abc", 1), text("a", 1)]
        assert [host.take(request, tokens[request])[1] for request in range(3)] == [128, 192, 64]
        assert host.make_room(9) == [[]]
        for request, page in [(1, 3), (0, 2), (2, 1)]:
            host.end(request, tokens[request])
            assert host.make_room(9) == [[page]]
        assert host.pool == PageBook.empty(10, ROWS)

    def test_only_those_that_were_taken_are_stored(self):
        host = Host()
        with pytest.raises(KvPoolError, match="request 99 is not in the KV pool"):
            host.end(99, text("a"))
        host.run(text(""))
        host.pool = host.pool.allocate(99, ROWS)
        host.end(99, text("a"))
        assert host.pool == PageBook.empty(10, ROWS)


class TestRoom:
    def test_least_recently_used_first_later_pages_before_earlier(self):
        assert Host("abc", "xy").make_room(5, 6, 7, 8, 9) == [[3], [2], [1], [5], [4]]

    def test_use_counts_when_it_ends(self):
        host = Host("abc", "xy")
        host.take(0, text("ab", 1))
        host.run(text("z"))
        host.end(0, text("ab", 1))
        assert host.make_room(4, 5, 6, 7, 8, 9) == [[3], [5], [4], [7], [2], [1]]

    def test_a_page_never_outlives_one_before_it(self):
        """Who computes what is stored uses it too."""
        host = Host()
        host.take(0, text("abc"))
        host.run(text("ab"))
        host.run(text("x"))
        host.end(0, text("abc"))
        assert host.make_room(6, 7, 8, 9) == [[6], [3], [5], [4]]

    def test_as_many_as_needed(self):
        host = Host("abcde")
        assert host.make_room(4, -1, 0, 6, 99) == [[], [], [], [4, 5], [1, 2, 3]]
        assert host.run(text("abcde")) == ([1, 2, 3, 4, 5], 0)

    def test_admission_makes_room(self):
        host = Host("abc", "xy")
        assert host.take(0, text("q"), 6 * ROWS) == ([2, 3, 6, 7, 8, 9], 0)
        assert host.take(1, text("ab"), 2 * ROWS) == ([1, 5], ROWS)
        assert host.take(2, text("xy"), ROWS) == ([4], ROWS)
        every = Host("abc", "xy").take(0, text("abc", 1), 9 * ROWS)
        assert every == ([1, 2, 3, 4, 5, 6, 7, 8, 9], 3 * ROWS)

    def test_a_refusal_changes_nothing(self):
        host = Host("abc", "xy")
        host.take(0, text("q"), ROWS)
        before = host.pool
        with pytest.raises(
            KvPoolError, match=r"request 1 needs 7 pages .* beside 2 kept for 576 rows, and 6 of"
        ):
            host.take(1, text("abx"), 9 * ROWS)
        with pytest.raises(KvPoolError, match="request 0 holds 1 pages"):
            host.take(0, text("abx"))
        with pytest.raises(KvPoolError, match="-1 rows"):
            host.take(1, text("abx"), -1)
        assert host.pool is before
        host.end(0, text("q"), 0)
        assert host.make_room(5, 6, 7, 8, 9) == [[3], [2], [1], [5], [4]]

    def test_beside_others_in_the_pool(self):
        host, chunks = Host(), StoredChunks()
        host.pool, _ = chunks.add(host.pool, b"chunk", 2 * ROWS)
        host.run(text("abc"))
        host.pool = chunks.make_room(host.pool, 5)
        assert host.take(1, text("abc", 1), 7 * ROWS) == ([3, 4, 5, 1, 2, 6, 7], 3 * ROWS)
        host.end(1, text("abc", 1))
        assert free(host.pool) == [1, 2, 6, 7, 8, 9]


class TestClear:
    def test_nothing_is_found_again(self):
        """What running requests have computed is lost, and what they compute now rests on that."""
        host = Host("abc")
        host.take(0, text("x"))
        host.pool = host.prefix.clear(host.pool)
        host.end(0, text("x"))
        assert host.pool == PageBook.empty(10, ROWS)
        assert [host.run(text("abc"))[1] for _ in range(2)] == [0, 2 * ROWS]

    def test_read_pages_become_free_with_their_last_reader(self):
        host = Host("abc")
        host.take(0, text("ab", 1))
        host.take(1, text("ab", 1))
        host.pool = host.prefix.clear(host.pool)
        assert free(host.pool) == [3, 6, 7, 8, 9]
        assert host.run(text("abc")) == ([3, 6, 7], 0)
        host.end(0, text("ab", 1))
        assert free(host.pool) == [4, 8, 9]
        host.end(1, text("ab", 1))
        assert free(host.pool) == [1, 2, 4, 5, 8, 9]
        assert host.take(2, text("ab", 1)) == ([3, 6, 1], 2 * ROWS)


@dataclasses.dataclass
class Running:
    """A request of the model.

    - `tokens`: all that it may compute.
    - `pages`: those that it holds; the first `shared` were stored.
    - `computed`: rows that were reused or computed.
    - `intact`: whether nothing was lost since its admission.
    """

    tokens: np.ndarray
    pages: list[int]
    shared: int
    computed: int
    intact: bool = True


def contents(tokens: np.ndarray, pages: int) -> list[bytes]:
    """What tells the first pages apart: all tokens up to the end of each."""
    return [tokens[: (i + 1) * ROWS].tobytes() for i in range(pages)]


POOL_PAGES = 19
WORDS = ["".join(word) for length in range(5) for word in itertools.product("ab", repeat=length)]


class Model(RuleBasedStateMachine):
    """The same bookkeeping by looking through everything, and what the pages on the device hold."""

    def __init__(self):
        super().__init__()
        self.prefix = PrefixPages()
        self.pool = PageBook.empty(POOL_PAGES, ROWS)
        self.ids = itertools.count()
        self.free = set(range(1, POOL_PAGES))
        self.running: dict[int, Running] = {}
        self.stored: dict[bytes, int] = {}
        self.used: dict[bytes, int] = {}
        self.written: dict[int, bytes] = {}
        self.ends = self.cleared = 0

    def read(self) -> set[int]:
        return {page for running in self.running.values() for page in running.pages}

    def oldest(self, beside: list[int]) -> list[bytes]:
        """Contents that nobody reads, in the order in which they are given up."""
        unread = [content for content, page in self.stored.items() if page not in {*self.read(), *beside}]
        return sorted(unread, key=lambda content: (self.used[content], -len(content)))

    def give_up(self, pages: int, beside: list[int]) -> None:
        for content in self.oldest(beside):
            if len(self.free) < pages:
                self.free.add(self.stored.pop(content))

    @precondition(lambda self: len(self.running) < 4)
    @rule(
        letters=st.sampled_from(WORDS),
        more=st.sampled_from([0, 1, ROWS - 1]),
        answer=st.sampled_from(["", "a", "b", "ab"]),
        missing=st.sampled_from([0, 0, 1, 40, 70]),
        first=st.sampled_from([0, 100, 999]),
    )
    def take(self, letters: str, more: int, answer: str, missing: int, first: int):
        """The prompt ends somewhere, and what follows is what others may have as a prompt."""
        tokens, request = text(letters + answer, 3), next(self.ids)
        prompt, rows = tokens[: len(letters) * ROWS + more], max(len(tokens) - missing, 0)
        most = contents(prompt, max(min(len(prompt) - 1, rows), 0) // ROWS)
        found = list(itertools.takewhile(self.stored.__contains__, most))
        shared = [self.stored[content] for content in found]
        own = -(-rows // ROWS) - len(shared)
        try:
            self.pool, reused = self.prefix.take(self.pool, request, prompt, rows)
        except KvPoolError:
            assert own > len(self.free) + len(self.oldest(beside=shared))
            return
        assert reused == len(shared) * ROWS
        assert [self.written[page] for page in self.pool.pages_of(request)[: len(shared)]] == found
        self.give_up(own, beside=shared)
        pages = shared + sorted(self.free)[:own]
        self.free.difference_update(pages)
        self.running[request] = Running(tokens[:rows], pages, len(shared), reused)
        self.compute(request, first)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), rows=st.sampled_from([1, 100, 999]))
    def go_on(self, data: st.DataObject, rows: int):
        self.compute(data.draw(st.sampled_from(sorted(self.running))), rows)

    def compute(self, request: int, rows: int) -> None:
        """Write rows; those that rest on what was lost are worth nothing."""
        running = self.running[request]
        others = [page for other in self.running.values() if other is not running for page in other.pages]
        first, running.computed = running.computed, min(running.computed + rows, len(running.tokens))
        for i in range(first // ROWS, -(-running.computed // ROWS)):
            page = int(self.pool.pages_of(request)[i])
            assert page not in {*others, *self.stored.values()}
            content = running.tokens[: min(running.computed, (i + 1) * ROWS)]
            self.written[page] = content.tobytes() if running.intact else b"lost"

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fewer=st.sampled_from([0, 0, 0, 64, 999]), known=st.booleans())
    def give_back(self, data: st.DataObject, fewer: int, known: bool):
        """`known`: whether tokens that are not computed are given too."""
        request = data.draw(st.sampled_from(sorted(self.running)))
        running = self.running.pop(request)
        computed = max(running.computed - fewer, 0)
        tokens = running.tokens if known else running.tokens[: max(computed, running.shared * ROWS)]
        self.pool = self.prefix.give_back(self.pool, request, tokens, computed)
        self.ends += 1
        full = max(computed // ROWS, running.shared) if running.intact else 0
        for page, content in zip(running.pages, contents(running.tokens, full), strict=False):
            self.stored.setdefault(content, page)
            self.used[content] = self.ends
        self.free.update({*running.pages}.difference(self.stored.values(), self.read()))

    @rule(pages=st.integers(0, 8))
    def make_room(self, pages: int):
        self.pool = self.prefix.make_room(self.pool, pages)
        self.give_up(pages, beside=[])

    @precondition(lambda self: self.ends > self.cleared + 5)
    @rule()
    def clear(self):
        """The device has lost all rows."""
        self.cleared = self.ends
        self.pool = self.prefix.clear(self.pool)
        self.free.update({*self.stored.values()}.difference(self.read()))
        self.stored.clear()
        self.written.clear()
        for running in self.running.values():
            running.intact = False

    @invariant()
    def every_page_is_in_one_state(self):
        assert free(self.pool) == sorted(self.free)
        held = {request: self.pool.pages_of(request).tolist() for request in self.pool.owned}
        assert held == {request: running.pages for request, running in self.running.items()}
        stored, read = set(self.stored.values()), self.read()
        assert len(stored) == len(self.stored)
        assert self.free.isdisjoint(read | stored)
        assert self.free | read | stored == set(range(1, POOL_PAGES))
        assert self.prefix.reclaimable == len(stored - read)
        assert [self.written[page] for page in self.stored.values()] == list(self.stored)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=100, stateful_step_count=50)
