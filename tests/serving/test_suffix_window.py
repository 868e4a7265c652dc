"""Steps that leave out masks far behind the block, against a model that sees the other rows only."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.serving.denoise.cached_packing import pack_refresh
from jdllm.serving.packing import demand
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.spec import generation_spec, infill_spec
from tests.conftest import DREAM, LLADA
from tests.decoding import oracle
from tests.decoding.test_against_oracle import check, prompts, sampled
from tests.engines import entry_of, generation_request, pack_all
from tests.helpers import slow
from tests.prefilling.oracle_model import Cache, forward, load

MASK = 510
GENERATED, BLOCK = 16, 4
IDS = {"llada": oracle.Ids(mask=510), "dream": oracle.Ids(mask=509, shift=True)}


def kept_rows(masked: list[bool], stop: int, window: int) -> list[int]:
    """The positions that are evaluated, one after another."""
    rows, left = [], window
    for at, is_masked in enumerate(masked):
        behind = is_masked and at >= stop and at != len(masked) - 1
        if not behind or left:
            rows.append(at)
        left -= behind and left > 0
    return rows


class Pruned:
    """The logits of each step of one request, from the rows that the step evaluates, in float64.

    Arguments:
    - `family`: of the tiny model.
    - `start`: the first generated position.
    - `sampling`: with a `suffix_window`; a cache refreshes at the first step of each block, and keeps all.
    """

    def __init__(self, family: str, start: int, sampling: SamplingParams):
        self.model = load({"llada": LLADA, "dream": DREAM}[family].directory)
        self.ids, self.start, self.sampling = IDS[family], start, sampling
        self.block: int | None = None
        self.rows, self.forwarded = np.zeros(0, int), np.zeros(0, int)
        self.stored: Cache | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        masked = x == self.ids.mask
        first = self.start + int(masked[self.start :].argmax())
        block = (first - self.start) // BLOCK
        refreshes = self.sampling.cache == "none" or block != self.block
        if refreshes:
            self.enter(block, masked)
        forwarded = self.rows if refreshes else self.forwarded
        slots = np.searchsorted(self.rows, forwarded)
        cache = None if refreshes else self.stored
        found = forward(self.model, x[forwarded], self.rows, cache=cache, slots=slots)
        if refreshes:
            self.stored = found.cache
        logits = np.full((len(x), found.logits.shape[1]), np.nan)
        logits[forwarded] = found.logits
        return logits

    def enter(self, block: int, masked: np.ndarray) -> None:
        start = self.start + block * BLOCK
        stop = start + BLOCK
        window = self.sampling.suffix_window
        assert window is not None
        self.block, self.rows = block, np.array(kept_rows(masked.tolist(), stop, window))
        first = start - self.ids.shift
        if self.sampling.cache == "selective":
            before = np.append(masked[1:], False) if self.ids.shift else masked
            self.forwarded = self.rows[(masked | before)[self.rows]]
        else:
            end = len(masked) if self.sampling.cache == "prefix" else stop
            self.forwarded = self.rows[(self.rows >= first) & (self.rows < end)]


def asked(window: int | None = 3, **options: Any) -> SamplingParams:
    return sampled(gen_length=GENERATED, block_length=BLOCK, suffix_window=window, **options)


def model_of(family: str, request: pytest.FixtureRequest) -> LLM:
    return request.getfixturevalue("llm" if family == "llada" else "dream_llm")


THRESHOLD = {"transfer": "threshold", "threshold": 0.3}
WHOLE = {"cache": "head_sparse", "retention": 1.0}
STEPS = [
    ("llada", {}, [{}, THRESHOLD, {"temperature": 0.7, "seed": 4}, {"cfg_scale": 0.8}]),
    slow("dream", {}, [{}, THRESHOLD]),
    slow("llada", {"cache": "prefix"}, [{}, THRESHOLD]),
    slow("dream", {"cache": "prefix"}, [{}, THRESHOLD]),
    slow("llada", {"cache": "dual"}, [{}, THRESHOLD]),
    ("dream", {"cache": "dual"}, [{}, THRESHOLD]),
    slow("llada", {"cache": "selective", "refresh_delay": 0, "refresh_interval": 0}, [{}, THRESHOLD]),
    slow("dream", {"cache": "selective", "refresh_delay": 0, "refresh_interval": 0}, [{}, THRESHOLD]),
    slow("llada", {**WHOLE, "refresh_delay": 0}, [{}, THRESHOLD]),
    slow("dream", {**WHOLE, "refresh_delay": 0}, [{}, THRESHOLD]),
]


@pytest.mark.parametrize(("family", "cache", "rules"), STEPS)
def test_each_step_is_that_of_a_model_without_the_other_rows(
    family: str, cache: dict[str, Any], rules: list[dict[str, Any]], request: pytest.FixtureRequest
):
    sampling = [asked(window, **cache, **rule) for rule, window in zip(rules, (3, 1, 0, 5), strict=False)]
    ids = prompts(len(sampling), seed=9)
    outputs = model_of(family, request).generate(prompt_token_ids=ids, sampling=sampling)
    states = [
        oracle.generate(Pruned(family, len(x), one), x, one, IDS[family])
        for x, one in zip(ids, sampling, strict=True)
    ]
    check(outputs, states)


@pytest.mark.parametrize("family", ["llada", slow("dream")])
def test_a_window_as_long_as_the_suffix_changes_nothing(family: str, request: pytest.FixtureRequest):
    model, caches = model_of(family, request), ("none", "dual", "head_sparse")
    ids = prompts(1, seed=3) * len(caches)
    longest = GENERATED - BLOCK
    plain, wide, wider = (
        model.generate(prompt_token_ids=ids, sampling=[asked(window, cache=cache) for cache in caches])
        for window in (None, longest - 1, 10**6)
    )
    for outputs in (wide, wider):
        check(outputs, [list(np.asarray(output.history)) for output in plain])


@pytest.mark.parametrize("family", ["llada", slow("dream")])
def test_a_short_window_changes_something(family: str, request: pytest.FixtureRequest):
    """Else nothing above would notice a window that is not used."""
    model, ids = model_of(family, request), prompts(3, seed=9)
    few, every = (
        model.generate(prompt_token_ids=ids, sampling=asked(window, transfer="margin"))
        for window in (0, None)
    )
    assert any((a.history != b.history).any() for a, b in zip(few, every, strict=True))


COMPANY = [
    asked(0),
    asked(2, cache="head_sparse", retention=0.6),
    asked(None, cache="dual"),
    asked(4, cache="selective", refresh_interval=2),
    asked(1, cache="prefix", temperature=0.8, seed=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_request_is_the_same_alone_and_in_company(family: str, request: pytest.FixtureRequest):
    model, ids = model_of(family, request), prompts(len(COMPANY), seed=1)
    together = model.generate(prompt_token_ids=ids, sampling=COMPANY)
    for prompt, sampling, output in zip(ids, COMPANY, together, strict=True):
        (alone,) = model.generate(prompt_token_ids=[prompt], sampling=sampling)
        check([output], [list(np.asarray(alone.history))])


@pytest.mark.slow
def test_infilling_evaluates_all_that_is_given(llm: LLM):
    sequence = np.random.default_rng(5).integers(0, 500, 30)
    sequence[[3, 4, 9, 14, 15, 22, 29]] = MASK
    runs = [
        llm.infill(token_ids=[sequence], sampling=SamplingParams(block_length=2, suffix_window=window))
        for window in (None, 4, 100)
    ]
    assert runs[0][0].token_ids == runs[1][0].token_ids == runs[2][0].token_ids


class TestRows:
    @given(st.lists(st.booleans(), min_size=2, max_size=40), st.integers(0, 12), st.integers(1, 5))
    def test_those_of_an_infill(self, config: ModelConfig, masked: list[bool], window: int, block: int):
        if not any(masked):
            return
        tokens = np.where(masked, MASK, 7)
        spec = infill_spec(tokens, SamplingParams(block_length=block, suffix_window=window), config)
        for one in spec.blocks:
            assert spec.evaluated(one).tolist() == kept_rows(masked, one.stop, window)

    @pytest.mark.parametrize(
        ("window", "first", "last"),
        [(None, 26, 26), (0, 15, 26), (3, 18, 26), (10, 25, 26), (11, 26, 26), (50, 26, 26)],
    )
    def test_those_of_a_generation(self, config: ModelConfig, window: int | None, first: int, last: int):
        spec = generation_spec(np.full(10, 7), asked(window), config)
        rows = [len(spec.evaluated(block)) for block in spec.blocks]
        assert (rows[0], rows[-1]) == (first, last)
        assert spec.rows == max(rows)
        assert rows == sorted(rows)

    def test_a_life_is_as_large_as_the_largest_step(self, config: ModelConfig):
        sampling = SamplingParams(
            gen_length=512, max_tokens=16, block_length=8, suffix_window=5, cache="dual"
        )
        spec = generation_spec(np.full(10, 7), sampling, config)
        assert spec.rows == spec.stored_rows == 10 + 16 + 5 + 1

    def test_a_batch_has_the_true_positions(self, config: ModelConfig):
        requests = [generation_request(i, np.full(10, 7), asked(i + 1), config) for i in range(2)]
        batch, candidates = pack_all(requests, config)
        counts = [demand(request)[0] for request in requests]
        assert counts == [16, 17]
        rows = np.split(np.asarray(batch.rows.positions)[: sum(counts)], counts[:1])
        assert [own.tolist() for own in rows] == [[*range(15), 25], [*range(16), 25]]
        for index, (start, own) in enumerate(zip((0, counts[0]), rows, strict=True)):
            head = np.asarray(batch.head.row)[np.asarray(batch.head.segment) == index] - start
            np.testing.assert_array_equal(own[head], candidates[index])

    @pytest.mark.parametrize(
        ("cache", "keep"),
        [("prefix", 10), ("dual", 14), ("selective", 10), ("sparse", 7), ("head_sparse", 7)],
    )
    def test_nothing_else_is_stored_or_forwarded(self, cache: str, keep: int, config: ModelConfig):
        """Of 10 tokens, a block of 4, a window of 3 and the last position."""
        request = generation_request(0, np.full(10, 7), asked(3, cache=cache, refresh_delay=0), config)
        pool = PageBook.empty(4, PAGE_ROWS).allocate(0, 26)
        batch = pack_refresh([request], config, pool, entry_of([request]))
        (stored,) = batch.stored
        assert stored is not None
        forwarded, count = stored
        assert count == int(batch.selection.keep[0]) == keep
        evaluated = [*range(17), 25]
        segment = np.asarray(batch.selection.segment)
        rows = np.asarray(batch.selection.row)[segment == 0]
        storable = np.asarray(batch.packed.batch.rows.positions)[rows]
        assert sorted([*forwarded.tolist(), *storable.tolist()]) == evaluated


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"transfer": "adaptive"},
            "transfer 'adaptive' evaluates all masks behind a block: leave suffix_window at None",
        ),
        ({"prefilling": "dream"}, "prefilling has no steps of whole sequences: leave suffix_window at None"),
    ],
)
def test_where_there_is_no_suffix_a_window_is_refused(options: dict[str, Any], reason: str):
    with pytest.raises(RequestError, match=reason):
        SamplingParams(suffix_window=32, **options)
