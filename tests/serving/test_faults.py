"""Whatever is asked, alone or in company: it is refused before anything runs, or ends as it does alone."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import JdllmError
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.pallas.device import CPU
from jdllm.planning.account import make_account
from jdllm.serving.background import Background
from jdllm.serving.build import limits_of
from jdllm.serving.demands import Demand, Life
from jdllm.serving.diagnosis import Diagnosis
from jdllm.serving.engine import Engine
from jdllm.serving.launch import Launch, Launcher
from jdllm.serving.mode import Costs, Extras
from jdllm.serving.modes.denoising import Denoising
from jdllm.serving.on_device import OnDevice
from jdllm.serving.pool.kv_pool import KvPool
from jdllm.serving.request import Request
from jdllm.serving.runner import Runner
from jdllm.serving.scheduler import Scheduler
from jdllm.serving.spec import RequestSpec, generation_spec, infill_spec
from jdllm.serving.updates import Ended, Update
from tests.engines import engine_of

PAGES = 4
"""Of the pool, of which three are given away: 384 rows."""


class Asked(NamedTuple):
    """What somebody asks: ids to fill in or to go on from, and options, which may be nonsense."""

    infill: bool
    ids: tuple[int, ...]
    options: dict[str, Any]


class Answer(NamedTuple):
    """What came of it: a refusal, or tokens with their log-probabilities and steps."""

    refusal: str | None
    tokens: list[int]
    logprobs: list[float]
    steps: int


def ids_of(seed: int, length: int, masks: float, mask_id: int) -> tuple[int, ...]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 500, length)
    ids[ids == mask_id] = 0
    ids[rng.random(length) < masks] = mask_id
    return tuple(ids.tolist())


def optional(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=values)


SHARES = st.sampled_from([1e-9, 0.02, 0.1, 0.5, 0.97, 1.0])
COUNTS = st.integers(0, 6) | st.sampled_from([2**24])
COMMON = st.fixed_dictionaries(
    {
        "gen_length": st.integers(1, 16),
        "temperature": st.sampled_from([0.0, 1.2e-38, 1e-40, 0.7, 1.0, 1e6]),
        "seed": st.integers(0, 2**64 - 1),
    },
    optional={
        "block_length": st.sampled_from([1, 2, 4, 8]),
        "steps": st.sampled_from([1, 4, 8, 16, 1000]),
        "logits_eos_inf": st.booleans(),
        "undefined_tokens": st.sampled_from(["official", "banned"]),
        "early_stop": st.booleans(),
    },
)
RARE = optional(
    max_tokens=st.integers(1, 16),
    top_p=SHARES,
    min_p=SHARES,
    top_k=st.sampled_from([1, 3, 50, 2**31 - 1]),
    stop_token_ids=st.lists(st.integers(0, 520), max_size=2),
    prompt_masks=st.just("official"),
    confidence_eos_eot_inf=st.sampled_from(["official", "fixed"]),
)
RULES = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {"transfer": st.just("threshold")},
        optional={"threshold": st.sampled_from([0.0, 0.3, 1.0, 1e6]), "threshold_strict": st.booleans()},
    ),
    st.fixed_dictionaries(
        {"transfer": st.just("falling_threshold")},
        optional={
            "threshold": st.sampled_from([0.0, 0.3, 1e6]),
            "threshold_fall": st.sampled_from([0.0, 1.0]),
        },
    ),
    st.fixed_dictionaries(
        {"transfer": st.just("factor")},
        optional={"factor": st.sampled_from([0.0, 2.0, 1e6]), "factor_end": st.just("fixed")},
    ),
    st.fixed_dictionaries(
        {"transfer": st.just("entropy_bound")}, optional={"entropy_bound": st.sampled_from([0.0, 3.0, 1e6])}
    ),
    st.just({"transfer": "margin"}),
    st.just({"remasking": "random"}),
    st.fixed_dictionaries(
        {
            "alg": st.sampled_from(
                ["origin", "maskgit_plus", "topk_margin", "entropy", "confidence_threshold"]
            )
        },
        optional={
            "alg_temp": st.sampled_from([0.0, 1.2e-38, 0.5, 1e6]),
            "eps": st.sampled_from([0.0, 1e-3, 1.0]),
            "threshold": st.sampled_from([0.0, 0.3, 1e6]),
        },
    ),
)
CACHES = st.one_of(
    optional(cfg_scale=st.sampled_from([0.0, 1.5, 1e6])),
    st.fixed_dictionaries(
        {"cache": st.sampled_from(["prefix", "dual", "selective"])},
        optional={"refresh_delay": COUNTS, "refresh_interval": COUNTS, "official_forcing": st.booleans()},
    ),
    st.just({"cache": "prompt"}),
    st.fixed_dictionaries(
        {"cache": st.sampled_from(["sparse", "head_sparse"])},
        optional={
            "retention": SHARES,
            "pool_kernel": st.sampled_from([1, 3, 2**24 - 1]),
            "refresh_delay": COUNTS,
            "refresh_interval": COUNTS,
        },
    ),
)


@st.composite
def some_asked(draw: st.DrawFn, mask_id: int) -> Asked:
    infill = draw(st.booleans())
    length = draw(st.integers(1, 12) | st.integers(1, 400))
    masks = draw(st.floats(0, 1)) * min(1, 16 / length) if infill else draw(st.sampled_from([0.0, 0.0, 0.02]))
    ids = ids_of(draw(st.integers(0, 1000)), length, masks, mask_id)
    rare = draw(RARE) if draw(st.booleans()) else {}
    return Asked(infill, ids, {**draw(COMMON), **rare, **draw(RULES), **draw(CACHES)})


class Model:
    """An engine of one model, of at most `rows` packed rows, and what it answers to each question alone."""

    def __init__(self, params: Params, config: ModelConfig, executables: Executables, rows: int = 32):
        self.config = config
        self._engine = engine_of(params, config, executables, rows, pages=PAGES)
        self._alone: dict[str, Answer] = {}

    def together(self, asked: Sequence[Asked], later: int = 0) -> list[Answer]:
        """Ask, `later` steps after each other."""
        engine, ended = self._engine, dict[int, Ended]()
        numbers: list[int | str] = []

        def deliver(update: Update) -> None:
            if isinstance(update, Ended):
                ended[update.request] = update

        for each in asked:
            before = engine.stats()
            try:
                make = infill_spec if each.infill else generation_spec
                spec = make(each.ids, SamplingParams(**each.options), self.config)
                numbers.append(engine.add(spec, deliver=deliver))
            except JdllmError as error:
                assert engine.stats() == before
                numbers.append(str(error))
            for _ in range(later):
                engine.step()
        while not engine.idle:
            engine.step()
        stats = engine.stats()
        assert (stats.free_pages, stats.failed) == (stats.pages, 0), [end.error for end in ended.values()]
        return [
            Answer(number, [], [], 0) if isinstance(number, str) else answer_of(ended[number].state)
            for number in numbers
        ]

    def check(self, asked: Sequence[Asked], later: int = 0) -> list[Answer]:
        """All are answered as they are alone. Other sizes of executables add in another order."""
        answers = self.together(asked, later)
        for each, answer in zip(asked, answers, strict=True):
            alone = self._alone.setdefault(repr(each), self.together([each])[0])
            assert answer._replace(logprobs=[]) == alone._replace(logprobs=[]), each
            np.testing.assert_allclose(answer.logprobs, alone.logprobs, atol=1e-4)
        return answers


def answer_of(state: Request) -> Answer:
    assert state.finished
    return Answer(None, state.tokens.tolist(), state.logprobs.tolist(), state.steps)


@pytest.fixture(scope="module")
def llada(params: Params, config: ModelConfig, executables: Executables) -> Model:
    return Model(params, config, executables)


@pytest.mark.slow
def test_shares_of_few_rows_and_other_ends_of_what_may_be_asked(llada: Model):
    """Shares below one row, nothing that may be stored, and values at their bounds, in one company."""
    mask = llada.config.mask_id
    assert mask is not None
    some, blocks = (5, 6, 7, 8, 9, 10), {"gen_length": 4, "block_length": 2}
    asked = [
        Asked(True, (mask,), {"cache": "sparse"}),
        Asked(True, (mask, 4, mask), {"cache": "head_sparse", "retention": 1e-9}),
        Asked(False, some, {**blocks, "cache": "sparse", "retention": 0.02}),
        Asked(False, some, {**blocks, "cache": "head_sparse", "retention": 0.02, "refresh_delay": 0}),
        Asked(True, (mask,) * 3, {"cache": "dual"}),
        Asked(True, (mask, 9, 8), {"cache": "prefix"}),
        Asked(True, (mask, 9, mask), {"cache": "prompt"}),
        Asked(False, some, {**blocks, "cache": "sparse", "refresh_delay": 2**24, "pool_kernel": 2**24 - 1}),
        Asked(False, some, {**blocks, "cache": "selective", "refresh_interval": 1}),
        Asked(False, some, {**blocks, "cache": "dual", "top_k": 2**31 - 1, "temperature": 1e6}),
        Asked(False, some, {"gen_length": 4, "alg": "entropy", "temperature": 1.2e-38, "alg_temp": 1.2e-38}),
        Asked(False, tuple(range(390)), {"cache": "dual"}),
        Asked(False, (mask,), {"gen_length": 4}),
        Asked(True, some, {}),
    ]
    answers = llada.check(asked)
    assert [bool(answer.refusal) for answer in answers] == [False] * 11 + [True] * 3
    assert "pages of the KV pool" in str(answers[11].refusal)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_nobody_fails_after_admission_or_for_the_company(family: str, request: pytest.FixtureRequest):
    names = ("params", "config") if family == "llada" else ("dream_params", "dream_config")
    params, config = map(request.getfixturevalue, names)
    model = Model(params, config, request.getfixturevalue("executables"), 512)

    @settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(st.lists(some_asked(config.mask_id), min_size=2, max_size=5), st.integers(0, 2))
    def check(asked: list[Asked], later: int):
        model.check(asked, later)

    check()


Fault = Callable[[Request], None]
"""Raises for a request that something is wrong with."""


class Counted(NamedTuple):
    """Costs that cannot be told of some requests."""

    costs: Costs
    fault: Fault

    def life(self, spec: RequestSpec) -> Life:
        return self.costs.life(spec)

    def demand(self, request: Request) -> Demand:
        self.fault(request)
        return self.costs.demand(request)


def faulty_engine(
    params: Params, config: ModelConfig, executables: Executables, *, packed: Fault, counted: Fault
) -> Engine:
    """An engine of 128 rows; `packed` is called with requests that are packed, `counted` before."""
    account = make_account(config, "float32", None, device=CPU, max_num_batched_tokens=128, kv_pool=2**22)
    pool = KvPool(config, jnp.float32, account.pages)
    model, background, mode = OnDevice(params, config, executables, account, pool), Background(), Denoising()
    parts = mode.parts(model, background, Extras())

    def faulty(launch: Launcher) -> Launcher:
        def launched(requests: list[Request], max_steps: int) -> Launch:
            for request in requests:
                packed(request)
            return launch(requests, max_steps)

        return launched

    launchers = {kind: faulty(launch) for kind, launch in parts.launchers.items()}
    parts = dataclasses.replace(parts, launchers=launchers, costs=Counted(parts.costs, counted))
    return Engine(
        Runner(launchers),
        pool,
        Scheduler(dataclasses.replace(limits_of(parts, account, pool), max_num_seqs=8)),
        account,
        mode,
        parts,
        background=background,
        non_finite=Diagnosis(None, config, executables, None),
    )
