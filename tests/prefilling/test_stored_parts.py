"""What the stages measure and store on the device, beside what the published code was recorded to find."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.execution.paged.parts import PackedParts, forward_parts
from jdllm.execution.paged.pool import KvArrays
from jdllm.execution.transformer import Wanted, final_norm
from jdllm.layers import head_logits
from jdllm.models.weights import head_weights
from jdllm.planning.buckets import row_bucket
from jdllm.planning.ladder import TILE_ROWS
from jdllm.prefilling.build import Evaluation, building
from jdllm.prefilling.retain import reduced_layers
from jdllm.prefilling.segments import Segment
from jdllm.serving.engine import Engine
from jdllm.serving.long.request import LongRequest
from jdllm.serving.long.stages import Retain
from jdllm.serving.part_packing import Read, packed_rows, table_of
from jdllm.stored_rows import Float8Rows
from tests.engines import engine_of
from tests.prefilling.asking import (
    PAGES,
    ROWS,
    all_free,
    asked,
    driven,
    end,
    model_of,
    preparation_of,
    question,
    recorded_spec,
    same,
)
from tests.prefilling.mixed import CONFIG, FAMILY
from tests.prefilling.oracle import OPEN
from tests.prefilling.oracle_cache import Retention, retention_scores
from tests.prefilling.oracle_model import Model
from tests.prefilling.recorded import Case, case_names, model
from tests.rounding import rounded_as_stored

QUICK = ("best47", "sparse_per_head")
EVERY_CASE = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in case_names()]
)

close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
close_logits = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=3e-4)


@pytest.fixture(scope="module")
def engine(build: Callable[..., Engine]) -> Engine:
    return build()


def prepared(engine: Engine, name: str) -> LongRequest:
    """A recorded run whose cache has been built, and the first step done; it is left in the engine."""
    return driven(engine, recorded_spec(name, CONFIG), lambda request: request.prepared)


def leave(engine: Engine, request: LongRequest) -> None:
    engine.abort(request.id)
    engine.step()
    all_free(engine)


def pool_of(engine: Engine) -> KvArrays:
    pool = engine.pool.arrays
    assert pool is not None
    return pool


def rows_of(engine: Engine, request: LongRequest, layer: int, count: int) -> list[np.ndarray]:
    """Keys and values of the first `count` rows of a request's parts, `[rows, kv_heads, head_dim]`."""
    assert request.layout is not None
    pages, found = engine.pool.pages_of(request.id), []
    for tensor in pool_of(engine):
        tensor = tensor.wide(jnp.dtype("float32")) if isinstance(tensor, Float8Rows) else tensor
        parts = []
        for part, rows in enumerate(request.layout.part_rows):
            at = request.page_of_part(part)
            held = np.moveaxis(np.asarray(tensor[layer, pages[at : at + -(-rows // 64)]]), 1, 2)
            parts.append(held.reshape(-1, *held.shape[2:])[:rows])
        found.append(np.concatenate(parts)[:count])
    return found


def rotated(keys: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Keys `[rows, heads, head_dim]` by the definition of rotary positions: pairs as complex numbers."""
    half = keys.shape[-1] // 2
    turn = np.exp(1j * positions[:, None] * theta ** (-np.arange(half) / half))[:, None]
    pairs = (keys[..., :half] + 1j * keys[..., half:]) * turn
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


@pytest.mark.slow
def test_in_8_bits_they_are_rounded(executables: Executables):
    """In the first layer, whose rows have seen nothing yet; rounding chooses no other chunks in this run."""
    name = "sparse_per_head"
    config = dataclasses.replace(CONFIG, kv_cache_dtype="fp8")
    engine = engine_of(model_of(FAMILY)[0], config, executables, ROWS, pages=PAGES)
    case, request = Case(name), prepared(engine, name)
    recorded = {t: case[f"kv_build.{t}_first"] for t in "kv"}
    shape = (-1, config.num_kv_heads, config.head_dim)
    keys, values = rows_of(engine, request, 0, len(recorded["k"]))
    positions = case["decode_positions"][: len(keys)]
    plain = rotated(recorded["k"].reshape(shape), positions, model().theta), recorded["v"].reshape(shape)
    for found, expected in zip((keys, values), plain, strict=True):
        # Recorded numbers are near ours, and may lie on the other side of a bound between two in 8 bits.
        assert np.isclose(found, rounded_as_stored(expected), rtol=1e-6).mean() > 0.999
    leave(engine, request)


@EVERY_CASE
def test_keys_and_values_are_those_recorded(engine: Engine, name: str):
    """The pool's keys are rotated to where each row is found when the answer is denoised."""
    case, config = Case(name), CONFIG
    request = prepared(engine, name)
    for layer, which in ((0, "first"), (config.num_layers - 1, "last")):
        recorded = {t: case[f"kv_build.{t}_{which}"] for t in "kv"}
        keys, values = rows_of(engine, request, layer, len(recorded["k"]))
        shape = (-1, config.num_kv_heads, config.head_dim)
        positions = case["decode_positions"][: len(keys)]
        expected = rotated(recorded["k"].reshape(shape), positions, model().theta)
        close(keys, expected)
        close(values, recorded["v"].reshape(shape))
        if f"kv_decode.k_{which}" not in case:
            continue
        front = len(case["decode_positions"]) - case.settings["max_new_tokens"]
        recorded = {t: case[f"kv_decode.{t}_{which}"][:front].reshape(shape) for t in "kv"}
        keys, values = rows_of(engine, request, layer, front)
        expected = rotated(recorded["k"], case["decode_positions"][:front], model().theta)
        close(keys, expected)
        close(values, recorded["v"])
    leave(engine, request)


@functools.cache
def logits_of() -> Any:
    """Logits of the rows that parts want."""
    params, config = model_of(FAMILY)

    def run(parts: PackedParts, pool: KvArrays | None) -> jax.Array:
        hidden, _ = forward_parts(params, config, parts, pool)
        return head_logits(final_norm(params, config, hidden), head_weights(params))

    return jax.jit(run)


def logits(
    engine: Engine, request: LongRequest, segment: Segment, reads: tuple[int, ...], wanted: np.ndarray
) -> np.ndarray:
    """Logits of some rows of a segment, which sees what is stored of some parts."""
    size = row_bucket(segment.size)
    tokens, rows = packed_rows(segment, size)
    table = None
    if reads:
        found = engine.pool.table_of([request.id], [request.live_rows(reads)])
        read = Read(np.asarray(found.pages), np.asarray(found.valid))
        table = table_of([read] * -(-segment.size // TILE_ROWS), size // TILE_ROWS)
    at = np.resize(wanted, 32).astype(np.int32)
    parts = PackedParts(tokens, rows, None, table, None, Wanted(at, np.arange(32) < len(wanted)))
    return np.asarray(logits_of()(parts, pool_of(engine) if reads else None))[: len(wanted)]


@pytest.mark.slow
@EVERY_CASE
def test_logits_of_the_first_token_and_of_the_first_step_are_those_recorded(engine: Engine, name: str):
    case = Case(name)
    request = prepared(engine, name)
    layout, spec = request.layout, request.long_spec
    assert layout is not None
    draft = np.array(request.prefilled.draft, np.int32)
    behind = np.concatenate([spec.long.scoring_query, draft])[-spec.prefilling.retention_window :]
    opening: Evaluation
    (opening,) = (e for e in building(layout, behind, case.mask_id, shifted=True) if e.opens is not None)
    first = logits(engine, request, opening.rows, opening.reads, np.array(opening.head) - 1)
    close_logits(first[0], case["first_token_logits"])
    assert request.tokens[len(spec.long.query)] == case["first_token_logits"].argmax()

    start = len(spec.long.query) + np.array(layout.block_slots(0))
    tokens = case["states"][np.flatnonzero(case["state_kinds"] == OPEN)[0]][layout.block_slots(0)]
    segment = Segment.of(tokens, np.full(len(tokens), len(tokens)), request.positions(start))
    others = tuple(part for part in range(len(layout.part_rows)) if part != layout.block_part(0))
    np.testing.assert_array_equal(request.stored, request.live_rows(others))
    found = logits(engine, request, segment, others, case["mask_rows"] - 1)
    close_logits(found, case["mask_logits"])
    leave(engine, request)


def measured(engine: Engine, request: LongRequest, chunks: list[int], window: np.ndarray) -> np.ndarray:
    """Values of the tokens of chunks, `[..., chunks, groups, tokens]`."""
    room = len(chunks) + 1  # one more than there are
    stage = Retain(preparation_of(engine).model, request, chunks, room, window.astype(np.int32))
    values = reduced_layers(np.asarray(stage.launch()()), request.long_spec.prefilling)
    return values[..., : len(chunks), :, :]


@pytest.mark.parametrize("name", [name for name in case_names() if Case(name).many("keep_scores")])
def test_values_of_tokens_are_those_recorded(engine: Engine, name: str):
    case = Case(name)
    recorded = case.many("keep_scores")
    request = LongRequest(recorded_spec(name, CONFIG))
    query = case.scoring_query
    if case.settings["token_score_use_generated"]:
        query = np.concatenate([query, case["draft_states"][-1][case["draft_confirmed"] != 0]])
    window = query[-case.settings["token_score_query_window"] :]
    chunks = [int(case["selected"][place]) for place in recorded]
    found = measured(engine, request, chunks, window)
    for i, values in enumerate(recorded.values()):
        mine = found[..., i, :, : values.shape[-1]]
        per_head = request.long_spec.prefilling.retention == "per_head"
        np.testing.assert_allclose(mine if per_head else mine[0], values, rtol=0, atol=5e-6)


# Settings in which no run was recorded, under our names and under those of the oracle. The last chunk is
# shorter than the pools.
VARIANTS = [
    (
        {"retention": "per_head", "retention_direction": "both", "retention_mask": "none"}
        | {"retention_pool": 8, "retention_pooling": "mean", "retention_depth": -2},
        {"per_head": True, "direction": "bidirectional", "mask": "full"}
        | {"kernel": 8, "pooling": "avgpool", "layers": 2, "layer_mode": "last"},
    ),
    (
        {"retention_direction": "chunk_to_query", "retention_mask": "none", "retention_heads": "max"}
        | {"retention_rows": "mean", "retention_pool": 7, "retention_depth": 9, "retention_window": 20},
        {"direction": "chunk_to_query", "mask": "full", "head_reduce": "max"}
        | {"reduce": "mean", "kernel": 7, "layers": 9, "layer_mode": "first", "window": 20},
    ),
    (
        {"retention": "per_head", "retention_mask": "query_to_chunk", "retention_pool": 1}
        | {"retention_window": 3, "retention_depth": 2, "retention_instruction": False},
        {"per_head": True, "mask": "query_to_chunk", "kernel": 1}
        | {"window": 3, "layers": 2, "layer_mode": "first", "with_prefix": False},
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), VARIANTS)
def test_values_of_tokens_are_those_of_the_oracle(
    engine: Engine, ours: dict[str, Any], theirs: dict[str, Any]
):
    asking = question(3, context=3 * 32 + 4)
    spec = asked(asking, CONFIG, prefilling={"tokens_kept": 3, **ours})
    retention = Retention(3, **theirs)
    found = measured(engine, LongRequest(spec), [3, 0, 2], asking.query[-retention.window :])
    oracle: Model = model()
    for i, number in enumerate([3, 0, 2]):
        chunk = spec.chunks[number].tokens
        expected = retention_scores(oracle, asking.instruction, chunk, asking.query, retention)
        mine = found[..., i, :, : len(chunk)]
        mine = mine if retention.per_head else mine[0]
        np.testing.assert_allclose(mine, expected, rtol=0, atol=5e-6)


@pytest.mark.slow
def test_a_context_far_shorter_than_a_chunk_takes_no_more_than_it_needs(engine: Engine):
    found = []
    for length in (64, 2**23):
        fields: dict[str, Any] = {"chunk_length": length, "tokens_kept": 9, "query_positions": "after_cache"}
        spec = asked(question(4, context=40), CONFIG, prefilling=fields)
        assert spec.rows < 200
        found.append(end(engine, spec))
    same(*found)
