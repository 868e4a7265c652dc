"""Questions over long contexts for tests: models, specs of recorded and of made-up ones, and their end."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdllm.checkpoints.loading import load_params
from jdllm.decoding.prefilling import Prefilling
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import Params
from jdllm.serving.engine import Engine
from jdllm.serving.long.preparation import Preparation
from jdllm.serving.long.request import LongContext, LongRequest, LongSpec, long_spec
from jdllm.serving.updates import Ended
from tests.helpers import Golden
from tests.prefilling.recorded import Case
from tests.prefilling.settings import sampling_of

ROWS, PAGES = 512, 200
"""Of most engines here, which thus share their executables."""

NOTHING = np.zeros(0, np.int32)
BOS = 506
"""Begins the chunks of made-up contexts."""


@functools.cache
def config_of(family: str) -> ModelConfig:
    return config_from_hf(Golden(family).directory)


@functools.cache
def model_of(family: str) -> tuple[Params, ModelConfig]:
    """A tiny checkpoint in f32."""
    config = config_of(family)
    return load_params(Golden(family).directory, config, "float32"), config


def ids_of(case: Case, part: str) -> np.ndarray:
    """A part of what a recorded run was asked; none where it is empty."""
    if f"{part}_ids" in case:
        return case[f"{part}_ids"]
    return NOTHING


def recorded_spec(name: str, config: ModelConfig) -> LongSpec:
    """What a recorded run asked for."""
    case = Case(name)
    long = LongContext(
        ids_of(case, "prefix"),
        ids_of(case, "context"),
        case["query_ids"],
        case.scoring_query,
    )
    return long_spec(long, sampling_of(case.settings, case.bos_id), config, None)


def question(seed: int, context: int = 100, query: int = 9, instruction: int = 4) -> LongContext:
    """Random ids; of one seed the instruction and the first tokens of the context are always the same."""
    lengths = instruction, context, query
    ids = [
        np.random.default_rng((seed, part)).integers(0, 500, length).astype(np.int32)
        for part, length in enumerate(lengths)
    ]
    return LongContext(ids[0], ids[1], ids[2], ids[2])


def asked(question: LongContext, config: ModelConfig, *, prefilling: Any = None, **sampling: Any) -> LongSpec:
    """A question in chunks of 32 tokens, answered in blocks of 8.

    Arguments:
    - `prefilling`: other fields of `Prefilling`, in a mapping.
    - `sampling`: other fields of `SamplingParams`.
    """
    how = Prefilling(**{"chunk_length": 32, "chunks_kept": 2, "bos_id": BOS, **(prefilling or {})})
    given = {
        "gen_length": 8,
        "block_length": 8,
        "transfer": "threshold",
        "threshold": 0.9,
        "early_stop": False,
        "return_history": True,
        **sampling,
    }
    return long_spec(question, SamplingParams(**given, prefilling=how), config, None)


def ends(engine: Engine, specs: Sequence[Any], **options: Any) -> list[Any]:
    """The states in which requests end, in order; raises what the first of them fails with."""
    states: dict[int, Any] = {}
    for update in engine.run(specs, **options):
        if isinstance(update, Ended):
            if update.error is not None:
                raise update.error
            states[update.request] = update.state
    return [states[i] for i in range(len(specs))]


def end(engine: Engine, spec: LongSpec) -> LongRequest:
    """The state in which a lone request ends."""
    (state,) = ends(engine, [spec])
    return state


def driven(engine: Engine, spec: LongSpec, until: Callable[[LongRequest], bool]) -> LongRequest:
    """A request that was added and driven until something holds; it is left in the engine."""
    number = engine.add(spec, updates="every")
    engine.step()
    request = engine.entries[number]
    assert isinstance(request, LongRequest)
    while not until(request):
        assert not engine.idle
        engine.step()
    return request


def same(some: LongRequest, other: LongRequest) -> None:
    """Both found and answered the same."""
    a, b = some.prefilled, other.prefilled
    assert (a.selected, a.spans, a.draft) == (b.selected, b.spans, b.draft)
    np.testing.assert_allclose(a.scores, b.scores, rtol=0, atol=5e-5)
    for mine, others in zip(a.kept, b.kept, strict=True):
        np.testing.assert_array_equal(mine, others)
    assert some.steps == other.steps
    np.testing.assert_array_equal(some.tokens, other.tokens)
    np.testing.assert_array_equal(some.history, other.history)


def preparation_of(engine: Engine) -> Preparation:
    """What prepares the requests of an engine."""
    [preparation] = [holder for holder in engine.parts.holders if isinstance(holder, Preparation)]
    return preparation


def all_free(engine: Engine) -> None:
    """No request has left anything in the engine."""
    stats = engine.stats()
    assert engine.idle
    assert stats.free_pages == stats.pages
    cache = engine.pool
    assert not any(holder.held for holder in engine.parts.holders)
    owned = {stored.owner for stored in cache.chunks.stored.values()}
    assert set(cache.book.owned) == owned
