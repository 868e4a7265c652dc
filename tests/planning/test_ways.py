"""The table of all ways to generate: its numbers are those of single plans, and of what an engine takes."""

import dataclasses
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.shapes import BLOCK_SHAPES
from jdllm.byte_sizes import parse_bytes
from jdllm.decoding.prefilling import PRESETS
from jdllm.decoding.registry import POLICIES
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import JdllmError
from jdllm.pallas.device import HOPPER
from jdllm.planning.answer import make_report
from jdllm.planning.blocks import plan_blocks
from jdllm.planning.buckets import row_bucket
from jdllm.planning.budget import Budget
from jdllm.planning.causal import plan_causal
from jdllm.planning.plan import LONGEST, Workload
from jdllm.planning.prefilling import Question
from jdllm.planning.question import StepQuestion
from jdllm.planning.ways import Way, every_way
from jdllm.serving.blocks.request import block_spec
from jdllm.serving.causal.request import causal_spec
from jdllm.serving.long.request import LongContext, long_spec
from jdllm.serving.spec import RequestSpec, generation_spec
from tests.helpers import Golden
from tests.planning.devices import CARD, GEN_LENGTH, MIB, MODELS, TALL, Device, engine_of, takes
from tests.planning.plan_command import assert_mistake, invoke

pytestmark = pytest.mark.usefixtures("no_card")

DREAM = PRESETS["dream"]
GIB = 1024 * MIB
HOST = 64 * GIB


def question(device: Device, cache: str = "none", context: int | None = None) -> StepQuestion:
    workload = Workload(device.config, device=HOPPER, cache_policy=cache)  # pyright: ignore[reportArgumentType]
    return StepQuestion(workload, CARD, device.budget, context, dict(device.sizes))


def ways(device: Device, context: int | None = None) -> dict[str, Way]:
    found = every_way(question(device, context=context), DREAM, Question(1))
    return {way.name: way for way in found}


def small_device(seed: int) -> Device:
    """A random small model in a random budget; the first without host memory, of which plans take longer."""
    rng = random.Random(seed)
    config = dataclasses.replace(
        TALL,
        num_layers=rng.choice([4, 12, 48]),
        num_kv_heads=rng.choice([2, 8]),
        vocab_size=rng.choice([4096, 32768]),
        logits_shift=rng.random() < 0.5,
    )
    name = f"random {seed}"
    MODELS[name] = config
    return Device(name, Budget(rng.randint(200, 500) * MIB, 0, rng.choice([0, HOST]) if seed else 0), ())


def spec_of(device: Device, tokens: int, cache: str) -> RequestSpec:
    """A request of so many tokens, the answer included."""
    config = device.config
    if config.in_order:
        return causal_spec(np.full(tokens - 1, 5, np.int32), SamplingParams(max_tokens=1), config)
    if config.in_parts:
        length = config.block_length
        assert length is not None
        return block_spec(np.full(tokens - length, 5, np.int32), SamplingParams(gen_length=length), config)
    sampling = SamplingParams(gen_length=GEN_LENGTH, cache=cache)  # pyright: ignore[reportArgumentType]
    return generation_spec(np.full(tokens - GEN_LENGTH, 5, np.int32), sampling, config)


def long_spec_of(device: Device, context: int) -> RequestSpec:
    """The question over a context that a plan is of by default."""
    one = Question(context)
    sampling = SamplingParams(gen_length=one.gen_length, prefilling=DREAM)
    ids = np.full(context, 5, np.int32)
    long = LongContext(ids[: one.instruction], ids, np.full(one.query, 6), np.full(one.query, 6))
    return long_spec(long, sampling, dataclasses.replace(device.config, bos_id=1), None)


def running(device: Device, spec: RequestSpec, options: Mapping[str, Any]) -> int:
    """How many of 70 such requests of one call an engine starts at once; 0 where the engine refuses one."""
    try:
        engine = engine_of(device, **{name: parse_bytes(value) for name, value in options.items()})
        first = engine.add(spec)
    except JdllmError:
        return 0
    engine.abort(first)
    life = engine.parts.costs.life(spec)
    numbers = range(10**9, 10**9 + 70)
    for number in numbers:
        engine.scheduler.add(number, life, call=-1)
    started = len(engine.scheduler.admit())
    for number in numbers:
        engine.scheduler.remove(number)
    return started


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_each_line_is_the_plan_of_its_way_and_what_an_engine_takes(seed: int):
    device = small_device(seed)
    found = ways(device)
    assert list(found) == ["exact", *POLICIES, "prefilling"]
    for name in ("exact", "prefix", "dual", "sparse"):
        way, cache = found[name], "none" if name == "exact" else name
        report = make_report(question(device, cache))
        assert way.fits == (report.refusal is None)
        assert (way.longest, way.on_device) == (report.longest.context, report.on_device.context)
        if way.fits:
            time = report.time
            assert (way.context, way.options) == (report.plan.context, report.options)
            assert (way.seconds, way.link_seconds, way.measured) == (time.seconds, time.link_seconds, True)
            assert way.host_bytes == report.host_bytes
            cuts = {f"{part} {count}" for part, count in vars(report.plan.chunks).items() if count > 1}
            if report.layered is not None:
                cuts = {f"{report.layered.layering.chunk} rows at a time"}
            assert {cut for cut in way.cut if not cut.endswith("away")} == cuts
            assert any(cut.endswith("away") for cut in way.cut) == (way.host_bytes > 0)
        for tokens, count in way.at_once.items():
            options = make_report(question(device, cache, tokens)).options
            assert count == running(device, spec_of(device, tokens, cache), options)
    for tokens, count in found["prefilling"].at_once.items():
        assert count == running(device, long_spec_of(device, tokens), {})
    assert found["prefix"] == found["selective"]._replace(name="prefix")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_the_longest_context_is_accepted_and_the_next_one_refused(seed: int):
    device = small_device(seed)
    for name, way in ways(device).items():
        if name not in ("exact", "dual", "sparse"):
            continue
        sampling = SamplingParams(gen_length=GEN_LENGTH, cache="none" if name == "exact" else name)
        assert takes(device, way.longest, sampling, **way.options)
        beyond = row_bucket(way.longest + 1) if name == "exact" else way.longest + 64
        assert not takes(device, beyond, sampling, **way.options)
        assert not takes(device, beyond, sampling, max_context=beyond)


def test_the_longest_context_of_a_question_is_accepted_and_the_next_one_refused():
    """Where fewer chunks than are kept have room, a context may have as many."""
    for mib in (74, 98):
        device = Device("small", Budget(mib * MIB, 0, 0), ())
        longest = ways(device)["prefilling"].longest
        assert 0 < longest < LONGEST
        assert running(device, long_spec_of(device, longest), {}) > 0
        assert running(device, long_spec_of(device, row_bucket(longest + 1)), {}) == 0


@pytest.mark.parametrize("mib", [300, 400])
def test_a_causal_model(mib: int):
    config = dataclasses.replace(TALL, attention="causal", mask_id=None)
    MODELS["tall causal"] = config
    device = Device("tall causal", Budget(mib * MIB, 0, HOST), ())
    prefill, decode = ways(device).values()
    account = question(device).account()
    plan = plan_causal(Workload(config, device=HOPPER), account, "h200", None)
    assert (prefill.longest, decode.longest) == 2 * (plan.prompt,)
    assert (prefill.seconds, decode.seconds) == (plan.prefill_seconds, plan.token_seconds)
    assert (prefill.measured, decode.measured) == (True, False)
    assert decode.link_seconds == plan.transfer_seconds
    assert prefill.host_bytes == plan.host_bytes > 0
    for tokens, count in decode.at_once.items():
        assert count == running(device, spec_of(device, tokens, "none"), {})
    assert running(device, spec_of(device, decode.longest + 1, "none"), {})
    assert not running(device, spec_of(device, row_bucket(decode.longest + 2) + 1, "none"), {})


def test_a_block_model():
    config = dataclasses.replace(BLOCK_SHAPES["sdar-8b"], num_layers=4)
    MODELS["blocks"] = config
    device = Device("blocks", Budget(8 * GIB, host=HOST), ())
    prefill, blocks = ways(device).values()
    plan = plan_blocks(Workload(config, device=HOPPER), question(device).account(), "h200", None)
    assert (prefill.seconds, blocks.seconds) == (plan.prefill_seconds, plan.evaluation_seconds)
    assert (prefill.longest, prefill.context) == (plan.longest, plan.prompt)
    for tokens, count in blocks.at_once.items():
        assert count == running(device, spec_of(device, tokens, "none"), {})


def table(model: Path, *options: str, code: int = 0) -> dict[str, Any]:
    result = invoke(model, "--table", "--json", "--target", "h200", *options)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_the_command_has_a_table_for_each_budget(llada: Path):
    found = table(llada, "--memory", "20GiB,24GiB", "--context", "4096", "--host-memory", "0")
    assert [one["budget_bytes"] for one in found["budgets"]] == [20 * GIB, 24 * GIB]
    assert (found["target"], found["positions"], found["dtype"]) == ("h200", 4096, "bfloat16")
    for one in found["budgets"]:
        lines = {way["name"]: way for way in one["ways"]}
        asked = "--memory", str(one["budget_bytes"]), "--target", "h200", "--json", "--host-memory", "0"
        for name, cache in (("exact", "none"), ("dual", "dual")):
            alone = json.loads(invoke(llada, *asked, "--cache", cache, "--context", "4096").stdout)
            assert lines[name]["longest"] == alone["max_context"]
            assert lines[name]["seconds"] == alone["step_seconds"]
            assert lines[name]["options"] == alone["options"]
        held = alone["engine"]["cached_requests"]["4096"]
        assert lines["dual"]["at_once"]["4096"] == held
        stages = invoke(llada, *asked, "--prefilling", "dream", "--context", "4096")
        assert lines["prefilling"]["seconds"] == json.loads(stages.stdout)["seconds"]


def test_the_table_in_words(llada: Path):
    result = invoke(llada, "--table", "--memory", "24GiB", "--target", "a100-40gb", "--host-memory", "0")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "24.00 GiB on a100-40gb, 0 B of host memory"
    assert lines[1].split() == ["longest", "device", "at", "once", "takes", "host", "link", "cut"]
    assert [line.split()[0] for line in lines[2:10]] == ["exact", *POLICIES, "prefilling"]
    # An A100 was not measured.
    assert all("at least" in line for line in lines[2:10])
    assert any(line.startswith("takes: a full step, a refresh or a whole question, of the") for line in lines)
    assert "prefilling: a question over 131072 tokens" in lines
    [needs] = [line for line in lines if line.startswith("prefix, dual, selective, prompt: ")]
    assert "tokens need --max-context" in needs


def test_what_does_not_fit_ends_with_3_and_is_named(llada: Path):
    options = ("--memory", "8GiB,24GiB", "--target", "h200", "--host-memory", "0", "--context", "4096")
    result = invoke(llada, "--table", *options)
    assert result.exit_code == 3
    assert result.stderr.startswith("error: 4096 tokens do not fit: exact, prefix, ")
    assert "prefilling in 8.00 GiB: raise --memory" in result.stderr
    assert "24.00" not in result.stderr
    assert result.stdout.count("does not fit") == 2 + len(POLICIES)
    [small, large] = table(llada, *options, code=3)["budgets"]
    assert {way["fits"] for way in small["ways"]} == {False}
    assert {way["fits"] for way in large["ways"]} == {True}


def test_a_pool_that_does_not_fit_leaves_no_way(llada: Path):
    [one] = table(llada, "--memory", "18GiB", "--host-memory", "0", "--kv-pool", "8GiB", code=3)["budgets"]
    assert {way["fits"] for way in one["ways"]} == {False}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--plot", "a.png"), "--plot is for the plan of one step"),
        (("--check",), "--check is for the plan of one step"),
        (("--cache", "dual"), "--table has a line for each cache"),
        (("--memory", "8GiB,much"), "--memory is 'much'"),
    ],
)
def test_mistakes(llada: Path, options: tuple[str, ...], words: str):
    assert_mistake(invoke(llada, "--table", "--target", "h200", *options), words)


def test_prefilling_is_for_models_that_see_all_tokens():
    options = ("--table", "--memory", "1GiB", "--target", "h200", "--prefilling", "dream")
    assert_mistake(invoke(Golden("llama").directory, *options), "--prefilling is for models that see all")
