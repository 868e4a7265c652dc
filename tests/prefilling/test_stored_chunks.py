"""Chunks whose keys stay in the pool: another question over them finds what it would find without."""

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.serving.engine import Engine
from jdllm.serving.long.request import LongContext, LongRequest
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.pool.stored_chunks import StoredChunks, content_key
from jdllm.serving.spec import generation_spec
from tests.engines import engine_of
from tests.prefilling.asking import (
    PAGES,
    ROWS,
    all_free,
    asked,
    end,
    ends,
    model_of,
    preparation_of,
    question,
    same,
)
from tests.prefilling.mixed import CONFIG, FAMILY

Build = Callable[..., Engine]

CHUNKS = 4
"""Of the usual question here; a page each, one more for the instruction. A request holds five."""


def another(asking: LongContext, seed: int, **parts: np.ndarray) -> LongContext:
    """The same with another query, or other parts."""
    query = question(seed, query=11).query
    return asking._replace(query=query, scoring_query=query, **parts)


def ask(engine: Engine, asking: LongContext, **options: Any) -> LongRequest:
    request = end(engine, asked(asking, CONFIG, **options))
    all_free(engine)
    return request


MASKS = pytest.mark.parametrize("mask", ["causal", "full"])


@MASKS
@pytest.mark.parametrize("instruction", [0, 4])
def test_a_second_question_over_the_same_context_encodes_no_chunk(build: Build, mask: str, instruction: int):
    asking, how = question(21, instruction=instruction), {"score_mask": mask}
    engine = build()
    assert ask(engine, asking, prefilling=how).prefilled.cached_chunks == 0
    for fields in ({}, {"score": "query"}, {"build": "chunk_only", "tokens_kept": 10}):
        query = another(asking, len(fields))
        second = ask(engine, query, prefilling=how | fields)
        fresh = ask(build(), query, prefilling=how | fields)
        assert (second.prefilled.cached_chunks, fresh.prefilled.cached_chunks) == (CHUNKS, 0)
        same(second, fresh)


@pytest.mark.slow
def test_what_rows_of_chunks_see_tells_stored_ones_apart(build: Build):
    """The keys of a chunk depend on its instruction and on the mask, and on nothing else."""
    asking, engine = question(22), build()
    ask(engine, asking)
    instruction, bos = question(23).instruction, {"bos_id": 7}
    for changed, how in [
        (another(asking, 1, instruction=instruction), {}),
        (another(asking, 2, instruction=asking.instruction[:3]), {}),
        (another(asking, 3), {"score_mask": "full"}),
        (another(asking, 4), bos),
        (another(asking, 5), {"chunk_length": 31}),
    ]:
        found = ask(engine, changed, prefilling=how)
        assert found.prefilled.cached_chunks == 0
        same(found, ask(build(), changed, prefilling=how))


@pytest.mark.parametrize("mask", ["none", "query_to_chunk"])
def test_rows_that_see_what_is_behind_them_are_never_stored(build: Build, mask: str):
    engine, asking = build(), question(24)
    for _ in range(2):
        found = ask(engine, asking, prefilling={"score_mask": mask})
        assert found.prefilled.cached_chunks == 0
    same(found, ask(build(), asking, prefilling={"score_mask": mask}))


@pytest.mark.slow
def test_chunks_of_other_contexts_are_found_among_new_ones(build: Build):
    """In any order, over several evaluations: 31 tokens and the first one make a chunk."""
    engine = build()
    some, others = question(25, 8 * 32), question(26, 14 * 32)
    assert ask(engine, some).prefilled.cached_chunks == 0
    context = np.concatenate([others.context[: 5 * 32], some.context, others.context[5 * 32 :]])
    asking = another(some, 1, context=context)
    mixed = ask(engine, asking, prefilling={"chunks_kept": 5})
    assert mixed.prefilled.cached_chunks == 8
    same(mixed, ask(build(), asking, prefilling={"chunks_kept": 5}))
    again = ask(engine, another(some, 2, context=context))
    assert again.prefilled.cached_chunks == 22
    same(again, ask(build(), another(some, 2, context=context)))


def test_a_chunk_that_occurs_twice_is_stored_once(build: Build):
    engine, asking = build(), question(27, 32)
    twice = asking._replace(context=np.tile(asking.context, 3))
    first = ask(engine, twice)
    np.testing.assert_allclose(first.prefilled.scores[1:], first.prefilled.scores[0], rtol=1e-6)
    assert len(engine.pool.chunks.stored) == 2
    second, expected = ask(engine, another(twice, 1)), ask(build(), another(twice, 1))
    assert second.prefilled.cached_chunks == 3
    # Which of three equal chunks are selected is a matter of rounding.
    assert second.steps == expected.steps
    np.testing.assert_array_equal(second.tokens, expected.tokens)


# Ten pages: a request holds five, and its chunks take the others.
TEN = 11


@pytest.mark.slow
def test_the_context_that_was_used_least_recently_goes_first(build: Build):
    engine, contexts = build(pages=TEN), [question(seed) for seed in (31, 32)]
    asked_for = [0, 0, 1, 0, 1, 1]
    cached = [ask(engine, another(contexts[i], n)).prefilled.cached_chunks for n, i in enumerate(asked_for)]
    assert cached == [0, CHUNKS, 0, 0, 0, CHUNKS]


@pytest.mark.slow
def test_requests_take_the_pages_of_chunks(build: Build):
    """Of ten pages five hold chunks when somebody needs eight: those that were used first go."""
    engine, asking = build(pages=TEN), question(33)
    ask(engine, asking)
    sampling = SamplingParams(gen_length=8, cache="dual", early_stop=False)
    prompt = np.random.default_rng(0).integers(0, 500, 490)
    ends(engine, [generation_spec(prompt, sampling, CONFIG)])
    all_free(engine)
    second = ask(engine, another(asking, 1))
    assert second.prefilled.cached_chunks == 1
    same(second, ask(build(pages=TEN), another(asking, 1)))
    assert ask(engine, another(asking, 2)).prefilled.cached_chunks == CHUNKS


@pytest.mark.slow
def test_a_context_that_does_not_fit_beside_its_request_is_not_stored(build: Build):
    engine, asking = build(pages=TEN), question(34, CHUNKS * 32 + 9)
    for n in range(2):
        found = ask(engine, another(asking, n))
        assert found.prefilled.cached_chunks == 0
        assert not engine.pool.chunks.stored
    same(found, ask(build(), another(asking, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("pages", [TEN, 17, 19])
def test_two_contexts_that_push_each_other_out_are_answered_alike(build: Build, pages: int):
    """Two chunks at a time, of each request in turn."""
    asking = [question(35), question(36, 120), question(35, 128)]
    specs = [asked(another(one, n), CONFIG) for n, one in enumerate(asking)]
    alone = [end(build(), spec) for spec in specs]
    engine = build(pages=pages, rows=128)
    for order in ([0, 1, 2], [2, 0, 1]):
        for i, found in zip(order, ends(engine, [specs[i] for i in order]), strict=True):
            same(found, alone[i])
        all_free(engine)


def test_chunks_that_were_never_written_are_not_read(build: Build, monkeypatch: pytest.MonkeyPatch):
    """A request took pages for its chunks, and then its evaluation could not run."""
    asking, engine = question(37), build()
    model = preparation_of(engine).model
    compile_ = model.compile

    def failing(what: str, *args: Any, **options: Any) -> Any:
        if what == "scores":
            raise MemoryError("no room")
        return compile_(what, *args, **options)

    monkeypatch.setattr(model, "compile", failing)
    with pytest.raises(MemoryError):
        ask(engine, asking)
    monkeypatch.setattr(model, "compile", compile_)
    all_free(engine)
    found = ask(engine, asking)
    assert found.prefilled.cached_chunks == 0
    same(found, ask(build(), asking))


@pytest.mark.slow
def test_chunks_are_forgotten_with_the_pool(executables: Executables):
    """A long exact request takes its room."""
    engine, asking = (
        engine_of(*model_of(FAMILY), executables, ROWS, pages=PAGES, max_context=ROWS),
        question(38),
    )
    first = ask(engine, asking)
    prompt = np.random.default_rng(0).integers(0, 500, ROWS)
    ends(engine, [generation_spec(prompt, SamplingParams(gen_length=4, early_stop=False), CONFIG)])
    second = ask(engine, asking)
    assert second.prefilled.cached_chunks == 0
    same(first, second)


def operation(what: str, numbers: int, rows: int) -> st.SearchStrategy[tuple[str, int, int]]:
    return st.tuples(st.just(what), st.integers(0, numbers), st.integers(0, rows))


OPERATIONS = st.lists(
    operation("add", 4, 130)
    | operation("find", 4, 0)
    | operation("find", 4, 0)
    | operation("room", 9, 0)
    | operation("hold", 1, 300)
    | operation("clear", 0, 0),
    min_size=8,
    max_size=30,
)


@given(OPERATIONS)
def test_stored_chunks_are_a_list_in_the_order_of_their_use(operations: list[tuple[str, int, int]]):
    chunks, pool = StoredChunks(), PageBook.empty(10, PAGE_ROWS)
    stored: OrderedDict[bytes, int] = OrderedDict()
    held: dict[int, int] = {}

    def free() -> int:
        return 9 - sum(stored.values()) - sum(held.values())

    def give_up(pages: int) -> None:
        while stored and free() < pages:
            stored.popitem(last=False)

    for what, number, rows in operations:
        before, changes = set(stored), chunks.changes
        key, pages = content_key(str(number)), -(-rows // PAGE_ROWS)
        if what == "add":
            if key in stored:
                continue
            give_up(pages)
            pool = chunks.make_room(pool, pages)
            if pool.free_pages >= pages:
                pool, _ = chunks.add(pool, key, rows)
                stored[key] = pages
        elif what == "find":
            found = chunks.find(key)
            assert (found is not None) == (key in stored)
            if found is not None:
                assert len(pool.pages_of(found.owner)) == stored[key] == -(-found.rows // PAGE_ROWS)
                stored.move_to_end(key)
        elif what == "room":
            give_up(number)
            pool = chunks.make_room(pool, number)
        elif what == "clear":
            stored.clear()
            pool = chunks.clear(pool)
        elif number in held:
            del held[number]
            pool = pool.release(number)
        else:
            give_up(pages)
            pool = chunks.make_room(pool, pages)
            if pool.free_pages >= pages:
                held[number] = pages
                pool = pool.allocate(number, rows)
        assert (key in chunks) == (key in stored)
        assert list(chunks.stored) == list(stored)
        if set(stored) != before:
            assert chunks.changes > changes
        assert pool.free_pages == free()
        assert chunks.pages(pool) == sum(stored.values())


def test_contents_are_told_apart():
    some, other = np.arange(3), np.arange(4)
    keys = [
        content_key("a", some),
        content_key("a", other),
        content_key("b", some),
        content_key("a", some, some),
        content_key("a", some, other),
        content_key("a", np.concatenate([some, other])),
        content_key("a", some[:0], some),
        content_key("a"),
    ]
    assert len(set(keys)) == len(keys)
    assert content_key("a", some.astype(np.int64)) == content_key("a", some.astype(np.int32))


@pytest.mark.slow
def test_pages_may_be_counted_while_chunks_are_used(build: Build):
    """`Engine.stats` is for any thread."""
    engine = build()
    specs = [
        asked(another(question(39, 10 * 32), n), CONFIG, prefilling={"score": "query"}) for n in range(5)
    ]
    ends(engine, specs[:2])
    failures: list[Exception] = []
    done = threading.Event()

    def count() -> None:
        while not done.is_set():
            try:
                stats = engine.stats()
                assert stats.free_pages <= stats.pages
            except Exception as error:
                failures.append(error)
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        ends(engine, specs)
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not failures
