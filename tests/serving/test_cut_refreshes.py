"""Refreshes that are cut by layers: tokens are those of whole ones, and other requests go on in between."""

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
import pytest

from jdllm.checkpoints.loading import load_params
from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo import checkpoint_path
from jdllm.execution.paged.pool import PAGE_ROWS, pool_bytes
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import Params, tree_bytes
from jdllm.pallas.device import CPU
from jdllm.planning.account import Account, make_account
from jdllm.planning.budget import Budget
from jdllm.planning.ladder import make_ladder
from jdllm.planning.step_needs import StepNeeds
from jdllm.serving.build import make_engine
from jdllm.serving.demands import CUT, Kind
from jdllm.serving.engine import Engine
from jdllm.serving.request import Request
from jdllm.serving.updates import Ended, PartDone, Update
from tests.engines import engine_of, finish, generation_request

ROWS, COMPANY_ROWS = 256, 48
BOUND = CUT * COMPANY_ROWS
CHOICES: list[dict[str, Any]] = [
    {"cache": "dual", "refresh_delay": 0},
    {"cache": "dual", "refresh_delay": 1},
    {"cache": "prefix", "temperature": 1.0},
    {"cache": "prefix", "refresh_delay": 1, "transfer": "threshold", "threshold": 0.5},
    {"cache": "sparse", "retention": 0.5, "refresh_delay": 0},
    {"cache": "sparse", "retention": 0.5, "refresh_delay": 1},
    {"cache": "head_sparse", "retention": 0.5, "refresh_delay": 0, "remasking": "random"},
    {"cache": "head_sparse", "retention": 0.5, "refresh_delay": 1},
    {"cache": "dual", "temperature": 0.7, "top_p": 0.8},
    {"cache": "none"},
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> tuple[Params, ModelConfig]:
    config = config_from_hf(checkpoint_path())
    return load_params(checkpoint_path(), config, "float32"), config


@pytest.fixture(scope="module")
def compiled() -> Iterator[Executables]:
    yield Executables("cpu")
    gc.collect()


OpenEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def open_engine(model: tuple[Params, ModelConfig], compiled: Executables) -> Iterator[OpenEngine]:
    """Opens engines that clients share, with sizes of refreshes that are cut."""
    engines: list[Engine] = []

    def open_one(**options: Any) -> Engine:
        engine = engine_of(*model, compiled, ROWS, company_rows=COMPANY_ROWS, **options)
        engine.scheduler.share()
        for kind in engine.parts.compiled_shared:
            kind.warm()
        engines.append(engine)
        return engine

    yield open_one
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def whole(model: tuple[Params, ModelConfig], compiled: Executables) -> Iterator[Engine]:
    """An engine whose refreshes are whole."""
    engine = engine_of(*model, compiled, ROWS)
    yield engine
    engine.close()


@pytest.fixture
def cut(open_engine: OpenEngine) -> Engine:
    return open_engine()


@pytest.fixture
def parts(cut: Engine) -> list[PartDone]:
    """The parts of `cut` as they are collected."""
    done: list[PartDone] = []
    cut.observe = done.append
    return done


def asked(config: ModelConfig, index: int, length: int, **options: Any) -> Request:
    given = {"gen_length": 12, "block_length": 6, "cache": "dual", "early_stop": False, "seed": index}
    prompt = np.random.default_rng(index).integers(1, 200, length - 12)
    return generation_request(index, prompt, SamplingParams(**given | options), config)


def result(state: Request) -> tuple[list[int], list[int], int]:
    return state.tokens.tolist(), state.committed_in.tolist(), state.steps


def alone(engine: Engine, requests: Sequence[Request]) -> list[Any]:
    return [result(finish(engine, [request])[1][0]) for request in requests]


def together(engine: Engine, requests: Sequence[Request]) -> list[Any]:
    return [result(state) for state in finish(engine, requests)[1]]


def drive(engine: Engine, until: Callable[[], bool]) -> None:
    for _ in range(2000):
        if until():
            return
        engine.step()
    raise AssertionError("the engine goes on for ever")


def empty(engine: Engine) -> bool:
    """Whether an engine without requests holds nothing."""
    held = sum(holder.held for holder in engine.parts.holders)
    return engine.idle and engine.parts.held() is None and not held


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_those_of_whole_refreshes(
    seed: int, cut: Engine, whole: Engine, parts: list[PartDone], model: tuple[Params, ModelConfig]
):
    """Requests that are cut, that are not, and that need something else, alone and in company."""
    rng = np.random.default_rng(seed)
    lengths = [int(rng.integers(BOUND, 230) if i % 3 == 0 else rng.integers(20, 90)) for i in range(8)]
    choices = [CHOICES[i] for i in rng.permutation(len(CHOICES))]
    requests = [asked(model[1], i, n, **choices[i]) for i, n in enumerate(lengths)]
    assert together(cut, requests) == alone(whole, requests)
    assert any(part.kind is Kind.LAYERS for part in parts)
    assert empty(cut)


@pytest.mark.parametrize("options", CHOICES[:8])
def test_each_policy_is_cut_exactly(
    options: dict[str, Any], cut: Engine, whole: Engine, parts: list[PartDone], model: Any
):
    requests = [asked(model[1], 3, 200, **options), asked(model[1], 4, 30)]
    assert together(cut, requests) == alone(whole, requests)
    layers = model[1].num_layers
    steps = [part.steps for part in parts if part.kind is Kind.LAYERS]
    assert steps
    # A layer each, and one evaluation in all.
    assert steps == ([0] * (layers - 1) + [1]) * sum(steps)


def test_a_refresh_counts_as_one_evaluation(cut: Engine, whole: Engine, model: Any):
    requests = [asked(model[1], 7, 200)]
    before = cut.evaluated, whole.evaluated
    assert together(cut, requests) == together(whole, requests)
    assert cut.evaluated - before[0] == whole.evaluated - before[1]
    stats = cut.stats()
    assert stats.served[Kind.LAYERS] == stats.parts[Kind.LAYERS] // model[1].num_layers
    assert stats.rows[Kind.LAYERS] == 200 * stats.served[Kind.LAYERS]
    assert stats.parts[Kind.REFRESH] == 0


def test_others_refresh_and_reuse_between_two_parts(cut: Engine, parts: list[PartDone], model: Any):
    """A short request does a step beside every part of a long one."""
    together(cut, [asked(model[1], 1, 200, steps=2), asked(model[1], 2, 40)])
    at = [i for i, part in enumerate(parts) if part.kind is Kind.LAYERS and part.steps == 0]
    between = [{part.kind for part in parts[i + 1 : j]} for i, j in itertools.pairwise(at[:5])]
    assert {Kind.REFRESH, Kind.REUSE} <= set().union(*between)
    assert all(between)


def test_a_second_long_request_waits_for_the_first(cut: Engine, parts: list[PartDone], model: Any):
    """Nobody holds hidden rows twice, and neither request waits for more than one refresh of the other."""
    first, second = (cut.add(asked(model[1], i, 200).spec) for i in (1, 2))
    drive(cut, lambda: cut.idle)
    served = [(part.ids[0], part.steps) for part in parts if part.kind is Kind.LAYERS]
    layers = model[1].num_layers
    whole = [served[i : i + layers] for i in range(0, len(served), layers)]
    assert all(len(set(ids)) == 1 for ids in (next(zip(*one, strict=True)) for one in whole))
    assert [one[0][0] for one in whole] == [first, second] * (len(whole) // 2)
    assert empty(cut)


def test_who_aborts_in_the_middle_leaves_nothing(
    cut: Engine, whole: Engine, parts: list[PartDone], model: Any
):
    """Another long request begins at once."""
    told: list[Update] = []
    other = asked(model[1], 2, 210)
    first = cut.add(asked(model[1], 1, 200).spec)
    cut.add(other.spec, deliver=told.append)
    drive(cut, lambda: sum(part.kind is Kind.LAYERS for part in parts) == 3)
    held = cut.parts.held()
    assert held is not None
    assert held.request == first
    cut.abort(first)
    drive(cut, lambda: cut.idle)
    [end] = [update for update in told if isinstance(update, Ended)]
    assert end.error is None
    assert result(end.state) == alone(whole, [other])[0]
    assert empty(cut)
    assert cut.stats().free_pages == cut.stats().pages


@pytest.mark.parametrize("kind", [Kind.LAYERS, Kind.REUSE])
@pytest.mark.parametrize("lost", [False, True])
def test_a_failure_in_the_middle_is_its_parts_alone(
    kind: Kind, lost: bool, cut: Engine, whole: Engine, parts: list[PartDone], model: Any, monkeypatch: Any
):
    """Requests of the part that fails end. The others give the tokens that they would have given, also where
    the failure takes the pool along, and a refresh that had begun begins again."""
    requests = [asked(model[1], 1, 200), asked(model[1], 2, 190), asked(model[1], 3, 40)]
    ends: dict[int, Ended] = {}
    numbers = [
        cut.add(request.spec, deliver=lambda u: ends.update({u.request: u} if isinstance(u, Ended) else {}))
        for request in requests
    ]
    launch, run, seen = cut.runner.submit, cut.pool.run, [0]

    def behind(*_: Any, **__: Any) -> Any:
        """The next layers, which are in flight behind the part that fails: nobody collects them."""
        monkeypatch.setattr(cut.pool, "run", run)
        raise RuntimeError("nothing has run")

    def submit(which: Kind, served: list[Request], max_steps: int) -> Any:
        pending = launch(which, served, max_steps)
        if which is kind and cut.parts.held() is not None:
            seen[0] += 1
            if seen[0] == 3:
                if kind is Kind.REUSE:
                    monkeypatch.setattr(cut.pool, "run", behind)
                ran = cut.runner.between_parts(lambda: failed(pending, cut, lost=lost))
                return pending._replace(ran=ran)
        return pending

    monkeypatch.setattr(cut.runner, "submit", submit)
    drive(cut, lambda: cut.idle)
    failing = {number for number, end in ends.items() if end.error is not None}
    assert len(failing) == 1
    assert (numbers[2] in failing) == (kind is Kind.REUSE)
    for number, expected in zip(numbers, alone(whole, requests), strict=True):
        assert number in failing or result(ends[number].state) == expected
    assert empty(cut)
    assert cut.stats().rebuilt == int(lost)


def failed(pending: Any, engine: Engine, *, lost: bool) -> Any:
    """What a part ends with that fails on the device; the pool may be lost with it."""
    ran: Future[Any] = Future()
    ran.set_exception(RuntimeError("the executable failed"))
    if lost:
        for array in jax.tree.leaves(engine.pool.device()):
            array.delete()
    return ran


def test_hidden_rows_leave_the_device_for_who_needs_all_of_it(cut: Engine, whole: Engine, model: Any):
    request, told = asked(model[1], 5, 110), list[Update]()

    def hidden() -> int:
        shape = 128, model[1].hidden_size
        return sum(array.shape == shape and not array.is_deleted() for array in jax.live_arrays())

    found, others = list[tuple[int, int]](), hidden()
    cut.add(request.spec, deliver=told.append)
    while not cut.idle:
        cut.step()
        found.append((cut.runner.between_parts(hidden) - others, cut.between_parts(hidden) - others))
    assert {before for before, _ in found} == {0, 1}
    assert {during for _, during in found} == {0}
    [end] = [update for update in told if isinstance(update, Ended)]
    assert result(end.state) == alone(whole, [request])[0]


def test_nothing_is_cut_without_a_warm_up_for_clients_who_share(
    model: tuple[Params, ModelConfig], compiled: Executables
):
    engine = engine_of(*model, compiled, ROWS, company_rows=COMPANY_ROWS)
    assert not any("by layers" in program.name for program in engine.programs())
    together(engine, [asked(model[1], 1, 200)])
    assert engine.stats().parts[Kind.LAYERS] == 0
    engine.scheduler.share()
    sizes = [entry for entry in make_ladder(ROWS).refresh if entry.rows > BOUND]
    assert sum("by layers" in program.name for program in engine.programs()) == 3 * len(sizes)
    together(engine, [asked(model[1], 1, 200)])
    assert engine.stats().parts[Kind.LAYERS] == 0
    engine.close()


def account_of(model: tuple[Params, ModelConfig], rows: int) -> Account:
    """Of a device with room for the weights, a step of so many rows and a small pool."""
    weights, config = tree_bytes(model[0]), model[1]
    needed = StepNeeds(config, "float32", CPU, None, ()).whole_with_margin(rows)
    budget = Budget(weights + needed + pool_bytes(config, "float32", 32, PAGE_ROWS), overhead=0)
    return make_account(
        config, "float32", budget, device=CPU, max_num_batched_tokens=rows, weights_bytes=weights
    )


def test_others_fit_beside_the_hidden_rows(compiled: Executables, model: tuple[Params, ModelConfig]):
    """What is compiled says so: the bytes of every size that may run meanwhile, and those of hidden rows."""
    account = account_of(model, ROWS)
    engine = make_engine(*model, compiled, account, company_rows=COMPANY_ROWS)
    engine.scheduler.share()
    for kind in engine.parts.compiled_shared:
        kind.warm()
    engine.add(asked(model[1], 1, 200).spec)
    drive(engine, lambda: engine.parts.held() is not None)
    held, room = engine.parts.held(), account.step_room(ROWS)
    assert held is not None
    assert room is not None
    assert 0 < held.rows < ROWS
    hidden = 256 * model[1].hidden_size * 4
    sizes = {program.name: program for program in engine.programs()}
    beside = [entry.rows for entry in make_ladder(ROWS).refresh if entry.rows <= ROWS - held.rows]
    for rows in beside:
        needs = compiled.get(sizes[f"refresh of {rows} rows"]).needs
        assert sum(needs) + hidden <= room.device
    drive(engine, lambda: engine.idle)
    engine.close()


def test_a_refresh_is_whole_where_no_other_fits_beside_hidden_rows(
    compiled: Executables, model: tuple[Params, ModelConfig]
):
    """The ladder has no size below the only one."""
    engine = make_engine(*model, compiled, account_of(model, 128), company_rows=COMPANY_ROWS)
    engine.scheduler.share()
    for kind in engine.parts.compiled_shared:
        kind.warm()
    together(engine, [asked(model[1], 1, 120)])
    parts = engine.stats().parts
    assert (parts[Kind.LAYERS], parts[Kind.REFRESH]) == (0, 2)
    engine.close()
