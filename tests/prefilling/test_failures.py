"""Long requests that are aborted or fail leave nothing behind, and the others as they are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.errors import NonFiniteError
from jdllm.execution.paged.pool import PAGE_ROWS, KvArrays, empty_pool
from jdllm.models.weights import Params
from jdllm.serving.demands import Kind
from jdllm.serving.engine import Engine
from jdllm.serving.long.request import LongRequest, LongSpec
from jdllm.serving.request import Request
from jdllm.serving.updates import Ended, StepUpdate
from tests.prefilling.asking import (
    all_free,
    asked,
    end,
    ends,
    model_of,
    preparation_of,
    question,
)
from tests.prefilling.mixed import CONFIG, FAMILY, SPECS, alike, long

Build = Callable[..., Engine]


def at_part(engine: Engine, number: int, then: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something while the part with that number, of those collected, is in flight."""
    collect, count = engine.runner.collect, iter(range(1000))

    def collected(pending: Any) -> Any:
        if next(count) == number:
            then()
        return collect(pending)

    monkeypatch.setattr(engine.runner, "collect", collected)


@pytest.mark.parametrize("name", ["two blocks", "few tokens"])
@pytest.mark.slow
def test_an_abort_leaves_nothing_behind_at_any_stage(
    build: Build, alone: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
):
    """With its part in flight. Another request is not touched, and the same one runs again afterwards."""
    stages, number = set[str](), 0
    while True:
        engine = build()
        aborted, other = engine.add(SPECS[name], updates="every"), engine.add(SPECS["whole"])
        reached: list[str] = []

        def abort(engine: Engine = engine, aborted: int = aborted, reached: list[str] = reached) -> None:
            if aborted in engine.entries:
                reached.append(preparation_of(engine).waits_for(aborted) or "steps")
            engine.abort(aborted)

        at_part(engine, number, abort, monkeypatch)
        found: dict[int, Any] = {}
        while not engine.idle:
            found |= {u.request: u for u in engine.step() if isinstance(u, Ended)}
        if not reached:
            break
        stages.update(reached)
        alike(found[other].state, alone["whole"])
        assert aborted not in found
        all_free(engine)
        assert engine.stats().aborted == 1
        again = end(engine, SPECS[name])
        alike(again, alone[name])
        if reached[0] not in ("draft", "score"):
            assert again.prefilled.cached_chunks == len(again.prefilled.scores)
        all_free(engine)
        number += 1
    expected = {"score", "build", "steps"} | ({"draft", "retain"} if name == "few tokens" else set())
    assert stages == expected


def failing(engine: Engine, kind: Kind, lost: bool, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets the next part of a kind that serves a request fail, perhaps with the pool."""
    doomed: set[int] = set()
    launch = engine.parts.launchers[kind]

    def launched(requests: list[Request], max_steps: int) -> Any:
        made = launch(requests, max_steps)
        if not doomed.intersection(request.id for request in requests):
            return made
        doomed.clear()

        def fail() -> Any:
            pool = engine.pool.arrays
            if lost and pool is not None:
                jax.tree.leaves(pool)[0].delete()
            raise RuntimeError("the device failed")

        return made._replace(run=fail)

    monkeypatch.setitem(engine.parts.launchers, kind, launched)
    return doomed.add


@pytest.mark.slow
@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("name", ["two blocks", "few tokens"])
def test_a_request_begins_again_where_another_takes_the_pool_with_it(
    build: Build, alone: dict[str, Any], name: str, lost: bool, monkeypatch: pytest.MonkeyPatch
):
    """At whatever stage it is: every step is told once, and the tokens are the same."""
    before, whole = 0, False
    while not whole:
        engine = build()
        engine.pool.make()
        fail = failing(engine, Kind.REFRESH, lost, monkeypatch)
        told: list[Any] = []
        number = engine.add(SPECS[name], updates="every", deliver=told.append)
        for _ in range(before):
            engine.step()
        whole = engine.idle
        fail(engine.add(SPECS["dual"], deliver=told.append))
        while not engine.idle:
            engine.step()
        ended = {update.request: update for update in told if isinstance(update, Ended)}
        assert str(ended[number + 1].error) == "the device failed"
        assert ended[number].error is None
        alike(ended[number].state, alone[name])
        steps = [u.step for u in told if isinstance(u, StepUpdate) and u.request == number]
        assert steps == list(range(alone[name].steps))
        all_free(engine)
        assert engine.stats().rebuilt == lost
        before += 1
    assert before > 6


@pytest.mark.slow
@pytest.mark.parametrize("lost", [True, False])
def test_a_stage_that_fails_ends_its_own_request(
    build: Build, alone: dict[str, Any], lost: bool, monkeypatch: pytest.MonkeyPatch
):
    for waiting in range(6):
        engine = build()
        fail = failing(engine, Kind.STAGE, lost, monkeypatch)
        told: list[Any] = []
        others = {
            engine.add(SPECS[name], deliver=told.append): name for name in ("two blocks", "dual", "exact")
        }
        failed = engine.add(SPECS["few tokens"], deliver=told.append)
        for _ in range(waiting):
            engine.step()
        fail(failed)
        while not engine.idle:
            engine.step()
        ended = {update.request: update for update in told if isinstance(update, Ended)}
        assert str(ended[failed].error) == "the device failed"
        for request, name in others.items():
            assert ended[request].error is None
            alike(ended[request].state, alone[name])
        all_free(engine)
        alike(end(engine, SPECS["few tokens"]), alone["few tokens"])


def damaged(token: int) -> Params:
    """The weights with an embedding that is not a number."""
    params = model_of(FAMILY)[0]
    return {**params, "embed": params["embed"].at[token].set(jnp.nan)}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["instruction", "context", "query"])
@pytest.mark.parametrize("score", ["draft", "query"])
def test_values_that_are_not_numbers_end_a_request(build: Build, part: str, score: str):
    """Only that one, and what it has stored spoils no other."""
    asking, fine = question(50), long(51, {"score": score}, gen_length=4)
    expected = end(build(), fine)
    used = np.concatenate([fine.prompt, expected.tokens])
    token = next(i for i in getattr(asking, part).tolist() if i not in used)
    engine = build(damaged(token))
    for updates in ("every", "none"):
        with pytest.raises(NonFiniteError, match=r"the weights .* are infinite or not"):
            ends(engine, [asked(asking, CONFIG, prefilling={"score": score})], updates=updates)
        engine.step()
        all_free(engine)
        alike(end(engine, fine), expected)


@pytest.mark.slow
def test_values_that_grow_too_large_in_a_context_alone_are_found(build: Build):
    """Neither the weights nor the query and its answer show where they begin."""
    asking, params = question(52), model_of(FAMILY)[0]
    token = next(i for i in asking.context.tolist() if i not in asking.query)
    layers = {**params["layers"], "v": params["layers"]["v"].at[0, :, 0].set(3e38)}
    embed = params["embed"].at[:, 0].set(0.0).at[token, 0].set(1e15)
    engine = build({**params, "layers": layers, "embed": embed})
    with pytest.raises(NonFiniteError, match="values exceed float32 in layer 0"):
        end(engine, asked(asking, CONFIG))
    all_free(engine)


def test_values_that_are_not_numbers_end_a_request_without_a_context(build: Build):
    asking = question(50, context=0)
    engine = build(damaged(int(asking.query[0])))
    with pytest.raises(NonFiniteError):
        end(engine, asked(asking, CONFIG))
    all_free(engine)


def nothing_written(*args: Any) -> KvArrays:
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), empty_pool(*args))


def poison(engine: Engine) -> None:
    """Make numbers of all rows that are not live into NaN, while no part runs."""
    cache = engine.pool
    if cache.arrays is None:
        return
    pages = cache.book
    live = np.zeros((pages.pages, PAGE_ROWS), bool)
    stored = {chunk.owner: chunk.rows for chunk in cache.chunks.stored.values()}
    for owner in pages.owned:
        held, valid = pages.pages_of(owner), None
        if owner in stored:
            valid = np.minimum(PAGE_ROWS, stored[owner] - PAGE_ROWS * np.arange(len(held)))
        elif owner in engine.entries:
            request = engine.entries[owner]
            if isinstance(request, LongRequest) and request.layout is not None:
                valid = request.live_rows(range(len(request.layout.part_rows)))
            elif isinstance(request, LongRequest):
                valid = np.zeros(len(held), int)
        live[held] = True if valid is None else np.arange(PAGE_ROWS) < np.resize(valid, len(held))[:, None]
    keep = live[None, :, None, :, None]
    cache.arrays = jax.tree.map(lambda x: jnp.where(keep, x, jnp.nan), cache.arrays)


@pytest.mark.slow
def test_rows_that_nothing_wrote_decide_nothing(
    build: Build, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """The pool is made of NaN, and what is not live becomes NaN again after every part."""
    monkeypatch.setattr("jdllm.serving.pool.kv_pool.empty_pool", nothing_written)
    names = [name for name, spec in SPECS.items() if isinstance(spec, LongSpec)]
    engine = build()
    groups = [[name] for name in names] + [[*names[::2], "dual", *names[1::2]]]  # these over stored chunks
    for group in groups:
        ids = {engine.add(SPECS[name]): name for name in group}
        found: dict[int, Ended] = {}
        while not engine.idle:
            found |= {u.request: u for u in engine.step() if isinstance(u, Ended)}
            engine.between_parts(lambda: poison(engine))
        for request, name in ids.items():
            assert found[request].error is None
            alike(found[request].state, alone[name])
