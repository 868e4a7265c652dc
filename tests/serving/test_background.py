"""A size that fits better is compiled while a larger one serves, and then it serves itself."""

import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import Cache, SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.planning.ladder import Entry, Sizes
from jdllm.serving.background import Background
from tests.conftest import IDLE
from tests.engines import engine_of, finish, generation_request

SMALL, LARGE = ENTRIES = [Entry(rows, rows, 8, 64) for rows in (128, 256)]


@pytest.fixture(autouse=True)
def _in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Background, "idle", IDLE)


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background()
    yield made
    made.close()


@pytest.fixture
def sizes() -> Sizes:
    made = Sizes(ENTRIES)
    made.compiled.add(LARGE)
    return made


def test_a_larger_size_serves_until_the_fitting_one_is_ready(background: Background, sizes: Sizes):
    release = threading.Event()
    background.start(sizes, SMALL, "step", release.wait)
    assert sizes.choose(100, 10, 1) == LARGE
    release.set()
    background.wait()
    assert sizes.choose(100, 10, 1) == SMALL
    assert background.idle


def test_in_step_with_other_processes_the_engine_waits_for_a_size(sizes: Sizes):
    background, release = Background(in_step=True), threading.Event()
    timer = threading.Timer(0.1, release.set)
    timer.start()
    background.start(sizes, SMALL, "step", release.wait)
    assert sizes.choose(100, 10, 1) == SMALL
    background.close()


def test_one_size_is_made_at_a_time(background: Background, sizes: Sizes):
    release, made = threading.Event(), []
    background.start(sizes, SMALL, "step", release.wait)
    other = Sizes(ENTRIES)
    assert not background.idle
    background.start(other, SMALL, "step", lambda: made.append("other"))
    release.set()
    background.wait()
    assert not made
    background.start(other, SMALL, "step", lambda: made.append("other"))
    background.wait()
    assert made == ["other"]


def test_what_fails_is_logged_once_and_the_larger_size_goes_on(
    background: Background, sizes: Sizes, caplog: pytest.LogCaptureFixture
):
    def fail() -> None:
        raise ValueError("the compiler refuses")

    with caplog.at_level(logging.WARNING, logger="jdllm"):
        background.start(sizes, SMALL, "full step of 128 rows", fail)
        background.wait()
    [record] = caplog.records
    assert "full step of 128 rows" in record.getMessage()
    assert record.exc_info is not None
    assert sizes.choose(100, 10, 1) == LARGE
    assert sizes.given_up == {SMALL}


def test_nothing_starts_after_the_end_which_waits_for_what_has_begun(sizes: Sizes):
    background, release, made = Background(), threading.Event(), []
    background.start(sizes, SMALL, "step", lambda: made.append(release.wait()))
    timer = threading.Timer(0.1, release.set)
    timer.start()
    background.close()
    assert made == [True]
    background.start(Sizes(ENTRIES), SMALL, "step", lambda: made.append(False))
    assert made == [True]


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["none", "dual"])
def test_tokens_are_the_same_before_and_after(cache: Cache, params: Params, config: ModelConfig):
    executables = Executables("cpu")
    engine = engine_of(params, config, executables, 256)
    # Steps of a full part, refreshes of a cached one.
    sampling = SamplingParams(gen_length=32, block_length=32 if cache == "none" else 2, cache=cache)

    def tokens(prompt: int) -> tuple[list[int], int]:
        request = generation_request(0, np.arange(1, 1 + prompt), sampling, config)
        _, [ended] = finish(engine, [request])
        return ended.tokens.tolist(), executables.compiled

    _, first = tokens(150)
    before, _ = tokens(20)
    engine.settle()
    after, then = tokens(20)
    assert after == before
    assert then == first + 1  # one of 128 rows beside that of 256
    engine.settle()
    assert executables.compiled == then
    engine.close()
