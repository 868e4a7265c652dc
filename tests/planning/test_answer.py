"""What a plan says of a context, and what an engine takes: the same, for whatever is planned."""

import contextlib
import dataclasses
import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from jdllm.byte_sizes import parse_bytes
from jdllm.decoding.registry import cache_names
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import ConfigError, JdllmError, RequestError
from jdllm.pallas.device import HOPPER
from jdllm.planning.account import Account, make_account
from jdllm.planning.answer import make_report
from jdllm.planning.asking import check_room
from jdllm.planning.buckets import row_bucket
from jdllm.planning.budget import Budget
from jdllm.planning.causal import plan_causal
from jdllm.planning.layered import CACHES
from jdllm.planning.offloading import account_with_offloading
from jdllm.planning.plan import Workload
from jdllm.planning.question import StepQuestion
from jdllm.planning.room import Room
from jdllm.serving.spec import generation_spec
from tests.planning.devices import CARD, GEN_LENGTH, MIB, Device, engine_of, takes

pytestmark = pytest.mark.usefixtures("no_card")


def some_device(rng: random.Random, hosts: Sequence[int]) -> Device:
    sizes_of = {"small": 40, "llada-8b": 15300, "dream-7b": 14600, "llada-moe-7b": 14100, "causal": 14600}
    name = rng.choice(sorted(sizes_of))
    weights = sizes_of[name]
    unit = 24 if name == "small" else 1024
    # Half of them have little room beside all weights.
    beside = unit * rng.uniform(0.2, rng.choice([5, 30]))
    mib = int(weights * rng.choice([0.5, 1, 1, 1]) + beside)
    host = rng.choice(hosts) * MIB
    sizes = {
        "max_num_batched_tokens": rng.choice([None, None, 500, 2048, 20000]),
        "max_context": rng.choice([None, None, None, 3000, 30000]),
        "kv_pool": rng.choice([None, rng.randint(unit * MIB // 8, unit * MIB * 8)]),
    }
    given = tuple((size, value) for size, value in sizes.items() if value is not None)
    return Device(name, Budget(mib * MIB, 0 if name == "small" else Budget(1).overhead, host), given)


class Asked(NamedTuple):
    tokens: int
    sampling: SamplingParams


def some_request(rng: random.Random) -> Asked:
    cache = rng.choice(cache_names())
    sparse = cache in ("sparse", "head_sparse")
    retention = rng.choice([None, 0.1, 0.25, 0.75]) if sparse else None
    lengths = [64, 1024, 8192, 16384, rng.randint(33, 3000), rng.randint(3000, 80000)]
    return Asked(rng.choice(lengths), SamplingParams(gen_length=GEN_LENGTH, cache=cache, retention=retention))


def workload_of(device: Device, sampling: SamplingParams) -> Workload:
    cache, retention = sampling.cache, sampling.retention
    return Workload(device.config, device=HOPPER, cache_policy=cache, retention=retention)


def check(device: Device, tokens: int, sampling: SamplingParams) -> None:
    if device.config.attention == "causal":
        check_causal(device, tokens)
        return
    workload = workload_of(device, sampling)
    try:
        report = make_report(StepQuestion(workload, CARD, device.budget, tokens, dict(device.sizes)))
    except ConfigError:
        assert not takes(device, tokens, sampling)
        return
    fits = report.refusal is None
    assert fits == takes(device, tokens, sampling, **report.options)
    if fits:
        # What the pool could hold with options may run layer by layer without.
        assert not report.options or sampling.cache in CACHES or not takes(device, tokens, sampling)
        assert tokens <= row_bucket(report.longest.context + 1)
    else:
        assert "max_context" in dict(device.sizes) or not takes(device, tokens, sampling, max_context=tokens)


def check_longest(device: Device, sampling: SamplingParams) -> None:
    """Where no context is asked for, a plan is of the longest that an engine takes."""
    if device.config.attention == "causal":
        return
    workload = workload_of(device, sampling)
    with contextlib.suppress(ConfigError):
        report = make_report(StepQuestion(workload, CARD, device.budget, None, dict(device.sizes)))
        if report.longest.context:
            assert report.refusal is None
            assert report.plan.context == report.longest.context
            assert takes(device, report.longest.context, sampling, **report.options)


def check_causal(device: Device, tokens: int) -> None:
    workload, sampling = Workload(device.config, device=HOPPER), SamplingParams(gen_length=GEN_LENGTH)
    try:
        account = account_with_offloading(
            device.config, "bfloat16", device.budget, device=HOPPER, **dict(device.sizes)
        )
    except JdllmError:
        assert not takes(device, tokens, sampling)
        return
    fits = plan_causal(workload, account, "h200", tokens - GEN_LENGTH, GEN_LENGTH).fits
    assert fits == takes(device, tokens, sampling)


class Case(NamedTuple):
    device: Device
    asked: list[Asked]
    sampling: SamplingParams
    """Of the longest context."""


def drawn(devices: int, each: int, hosts: Sequence[int]) -> list[Case]:
    """So many devices, each with so many requests."""
    rng = random.Random(each)
    cases: list[Case] = []
    for _ in range(devices):
        device = some_device(rng, hosts)
        asked = [some_request(rng) for _ in range(each)]
        cases.append(Case(device, asked, some_request(rng).sampling))
    return cases


FEW = drawn(4, 15, [0])
MANY = drawn(100, 20, [0, 2, 64 * 1024])


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(FEW, id="few"),
        *(
            pytest.param(MANY[start : start + 25], id=f"many from {start}", marks=pytest.mark.slow)
            for start in range(0, 100, 25)
        ),
    ],
)
def test_an_engine_takes_what_a_plan_says_fits_and_nothing_else(cases: list[Case]):
    for case in cases:
        for asked in case.asked:
            check(case.device, *asked)
        check_longest(case.device, case.sampling)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [({}, [110_080, 140_032, 200_000]), ({"kv_pool": 512 * MIB}, [16384, 40960, 65536])],
)
def test_a_refusal_names_options_that_make_room(sizes: dict[str, Any], lengths: list[int]):
    device = Device("dream-7b", Budget(24 * 1024 * MIB, host=0), tuple(sizes.items()))
    sampling = SamplingParams(gen_length=GEN_LENGTH, cache="prefix")
    account = account_with_offloading(device.config, "bfloat16", device.budget, device=HOPPER, **sizes)
    for tokens in lengths:
        assert not takes(device, tokens, sampling)
        assert account.sharing is not None
        options = dict(Room(tokens, tokens).options(account.sharing))
        with pytest.raises(RequestError) as refused:
            check_room(account, tokens, tokens // 64)
        for name, value in options.items():
            assert f"{name}={value!r}" in str(refused.value)
        if memory := options.pop("memory", None):
            device = device._replace(budget=Budget(parse_bytes(memory), host=0))
        assert takes(device, tokens, sampling, **options)


def test_a_plan_of_a_cached_request_names_the_context_that_the_engine_has_to_be_asked_for():
    device = Device("dream-7b", Budget(24 * 1024 * MIB), ())
    workload = workload_of(device, SamplingParams(cache="head_sparse"))
    report = make_report(StepQuestion(workload, CARD, device.budget, 200_000, {}))
    assert report.options == {"max_context": 200_000}
    assert report.engine is not None
    assert report.engine.max_refresh >= 200_000
    assert report.longest.context > 240_000


@pytest.mark.parametrize(("mib", "moved"), [(70, True), (480, True), (620, False)])
def test_the_longest_without_host_memory_moves_no_layer(mib: int, moved: bool):
    """Whether or not the default engine has layers in host memory, and for longer contexts it moves more."""
    device = Device("small" if mib < 100 else "tall", Budget(mib * MIB, 0, 64 * 1024 * MIB), ())
    workload = workload_of(device, SamplingParams(cache="prefix"))
    report = make_report(StepQuestion(workload, CARD, device.budget, None, {}))
    alone = make_report(StepQuestion(workload, CARD, Budget(mib * MIB, 0, 0), None, {}))
    account = account_with_offloading(device.config, "bfloat16", device.budget, device=HOPPER)
    assert (account.offloaded > 0) == moved
    assert report.engine is not None
    assert report.engine.offloaded > 0
    assert report.longest.context > report.on_device.context > 0
    assert report.on_device == alone.longest == alone.on_device


TWELVE = Device("llada-8b", Budget(12 * 1024 * MIB, host=64 * 1024 * MIB), ())
"""Its engine has some layers in host memory, and could have more there."""


@pytest.mark.parametrize(("cache", "tokens"), [("prefix", 15_296), ("none", 400_000)])
def test_a_refusal_says_that_more_layers_in_host_memory_make_room(cache: str, tokens: int):
    sampling = SamplingParams(gen_length=GEN_LENGTH, cache=cache)  # pyright: ignore[reportArgumentType]
    spec = generation_spec(np.full(tokens - GEN_LENGTH, 5, np.int32), sampling, TWELVE.config)
    with pytest.raises(JdllmError, match="set max_context=") as refused:
        engine_of(TWELVE).add(spec)
    named = re.search(r"set max_context=(\d+)", str(refused.value))
    assert named is not None
    assert "memory=" not in str(refused.value)
    assert takes(TWELVE, tokens, sampling, max_context=int(named[1]))


def test_a_refusal_names_more_memory_where_no_layer_is_left():
    sampling = SamplingParams(gen_length=GEN_LENGTH, cache="prefix")
    spec = generation_spec(np.full(30_000, 5, np.int32), sampling, TWELVE.config)
    with pytest.raises(RequestError, match="set memory='"):
        engine_of(TWELVE).add(spec)


@pytest.mark.parametrize("cache", ["none", "prefix"])
def test_a_context_that_fits_beside_few_layers_fits_in_memory_that_just_holds_all(cache: str):
    """In 300 MiB the layers do not fit; in 340 they do, and leave little room for anything else."""
    sampling, longest = SamplingParams(gen_length=GEN_LENGTH, cache=cache), []  # pyright: ignore[reportArgumentType]
    for mib in (300, 340):
        device = Device("tall", Budget(mib * MIB, 0, 64 * 1024 * MIB), ())
        report = make_report(StepQuestion(workload_of(device, sampling), CARD, device.budget, None, {}))
        assert takes(device, report.longest.context, sampling, **report.options)
        longest.append(report.longest.context)
    assert GEN_LENGTH < longest[0] <= longest[1]


def account_of(device: Device, **options: Any) -> Account:
    return account_with_offloading(device.config, "bfloat16", device.budget, device=HOPPER, **options)


TIGHT = [("llada-8b", 16), ("llada-8b", 17.5), ("dream-7b", 15.5), ("causal", 15.25), ("llada-moe-7b", 15)]


@pytest.mark.parametrize(("name", "gib"), TIGHT)
def test_a_default_engine_has_room_for_a_usual_context(name: str, gib: float):
    """The weights fit, and leave less room than a sequence of 4096 tokens takes: some layers move."""
    options: dict[str, Any] = {} if name == "causal" else {"cache": "prefix"}
    sampling = SamplingParams(gen_length=GEN_LENGTH, **options)
    alone = Device(name, Budget(int(gib * 1024) * MIB, host=0), ())
    tight = alone._replace(budget=Budget(int(gib * 1024) * MIB))
    whole, moved = account_of(alone), account_of(tight)
    assert takes(alone, 64, SamplingParams(gen_length=GEN_LENGTH))
    assert not takes(alone, 4096, sampling)
    assert takes(tight, 4096, sampling)
    assert whole.offloaded == 0 < moved.offloaded < alone.config.num_layers // 2
    assert moved.rows >= 4096
    # As few as possible: one less does not do. Two layers arrive at a time, so one or two free nothing.
    fewer = make_account(alone.config, "bfloat16", tight.budget, device=HOPPER, offloaded=moved.offloaded - 1)
    assert moved.offloaded <= 3 or fewer.rows < 4096 or fewer.pages <= 64


def test_layers_stay_where_a_usual_context_has_room_or_somebody_asks_for_less():
    roomy = Device("llada-8b", Budget(19 * 1024 * MIB), ())
    tight = Device("llada-8b", Budget(17 * 1024 * MIB), ())
    some: list[tuple[Device, dict[str, Any]]] = [
        (roomy, {}),
        (roomy, {"max_context": 10_000}),
        (tight, {"max_context": 1500}),
        (tight, {"kv_pool": 64 * MIB}),
        (tight._replace(budget=Budget(17 * 1024 * MIB, host=1 << 30)), {}),  # too little host memory
    ]
    for device, options in some:
        alone = make_account(device.config, "bfloat16", device.budget, device=HOPPER, **options)
        assert account_of(device, **options) == alone
    assert account_of(tight).offloaded > account_of(tight, max_context=3000).offloaded > 0


def test_a_long_exact_step_keeps_all_layers_on_the_device_by_a_small_pool():
    """Beside all layers the residual stream and keys may be in host memory, but not beside some of them."""
    device = Device("tall", Budget(440 * MIB, 0, 64 * 1024 * MIB), ())
    sampling = SamplingParams(gen_length=GEN_LENGTH)
    report = make_report(StepQuestion(workload_of(device, sampling), CARD, device.budget, None, {}))
    assert set(report.options) == {"kv_pool"}
    assert report.plan.host_tiers == ["residual", "kv"]
    assert takes(device, report.longest.context, sampling, **report.options)
    assert not takes(device, report.longest.context, sampling)
    short = make_report(StepQuestion(workload_of(device, sampling), CARD, device.budget, 1000, {}))
    assert (short.options, short.plan.host_tiers) == ({}, ["weights"])


def test_a_pool_that_is_asked_for_moves_layers():
    """By default a share of the room is for larger steps of several requests."""
    device = Device("llada-8b", Budget(16 * 1024 * MIB), ())
    sampling = SamplingParams(gen_length=GEN_LENGTH, cache="prefix")
    report = make_report(StepQuestion(workload_of(device, sampling), CARD, device.budget, 23_872, {}))
    assert set(report.options) == {"max_context", "kv_pool"}
    assert takes(device, 23_872, sampling, **report.options)
    assert not takes(device, 23_872, sampling, max_context=23_872)


@pytest.mark.parametrize("cache", ["dual", "head_sparse"])
def test_a_request_runs_layer_by_layer_where_no_pool_holds_it(cache: str):
    """Options may make room in the pool, on the device. Beyond, keys are in host memory, without options."""
    device = Device("tall", Budget(400 * MIB, 0, 64 * 1024 * MIB), ())
    sampling = SamplingParams(gen_length=GEN_LENGTH, cache=cache)  # pyright: ignore[reportArgumentType]
    workload = workload_of(device, sampling)
    longest = make_report(StepQuestion(workload, CARD, device.budget, None, {}))
    assert longest.layered is not None
    assert longest.options == {}
    assert longest.longest.context > longest.on_device.context
    assert takes(device, longest.longest.context, sampling)
    assert not takes(device, row_bucket(longest.longest.context + 1), sampling)
    assert max(longest.layered.prompt_bytes, longest.layered.token_bytes) <= 400 * MIB
    assert longest.engine is not None
    assert longest.host_bytes == longest.layered.host_bytes + longest.engine.streamed
    pooled = make_report(StepQuestion(workload, CARD, device.budget, longest.on_device.context, {}))
    assert pooled.layered is None
    other = dataclasses.replace(workload, cache_policy="prefix" if cache == "dual" else "sparse")
    assert make_report(StepQuestion(other, CARD, device.budget, None, {})).on_device == longest.on_device
