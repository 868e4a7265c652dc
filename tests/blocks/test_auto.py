"""Block models whose requests leave to the engine how they generate: tokens are those of block length 1."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jdllm.decoding.causal_sampling import check_causal, check_denoising
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import NoRoomError, RequestError
from jdllm.llm import LLM
from jdllm.serving import ways
from jdllm.serving.auto_spec import AutoSpec
from jdllm.serving.updates import StepUpdate
from tests.blocks.recorded import sdar_runs
from tests.blocks.recorded_nemotron import NEMOTRON, autoregressive_runs
from tests.causal.running import Build
from tests.helpers import slow

AUTO: dict[str, Any] = {"generation_mode": "auto"}
LOSSLESS = SamplingParams(gen_length=24, early_stop=False, **AUTO)
DRAFTS = LOSSLESS.changed(generation_mode="self_speculation")
ONE = SamplingParams(gen_length=24, early_stop=False, block_length=1)
RULE: dict[str, Any] = {"transfer": "dynamic", "threshold": 0.05}
NAMES = ["autoregressive", "self_speculation", "diffusion"]
SIZES: dict[str, Any] = {"max_num_batched_tokens": 256, "kv_pool": "8MiB", "progress": False}


def prompts(*lengths: int) -> list[np.ndarray]:
    return [np.random.default_rng([3, n]).integers(0, 300, n).astype(np.int32) for n in lengths]


@pytest.fixture(params=["sdar", slow("fast_dllm_v2"), slow("llada2")])
def llm(request: pytest.FixtureRequest) -> LLM:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def nemotron() -> Iterator[LLM]:
    with LLM(NEMOTRON.directory, plain_drafts=True, **SIZES) as llm:
        yield llm


def choosing(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let the engine choose these ways, one request after another, again and again."""
    chosen = itertools.cycle(map(NAMES.index, names))
    monkeypatch.setattr(ways, "quickest", lambda expected: next(chosen))


@pytest.mark.parametrize("names", [slow(NAMES[:1]), slow(NAMES[1:2]), NAMES[:2]], ids="-".join)
def test_tokens_are_those_of_blocks_of_one_position(
    llm: LLM, names: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Whatever is chosen, alone and in company with requests of all ways."""
    choosing(monkeypatch, *names)
    ids = prompts(5, 63, 64, 80)
    outputs = llm.generate(prompt_token_ids=ids * 2, sampling=[LOSSLESS] * 4 + [ONE, ONE, DRAFTS, DRAFTS])
    told = (list(names) * 4)[:4]
    assert [output.generation_mode for output in outputs] == [*told, *[None] * 4]
    found, expected = outputs[:4], llm.generate(prompt_token_ids=ids, sampling=ONE)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected] * 2
    alone = [llm.generate(prompt_token_ids=[one], sampling=LOSSLESS)[0] for one in ids]
    assert [output.token_ids for output in alone] == [output.token_ids for output in expected]
    drafted = llm.generate(prompt_token_ids=ids, sampling=DRAFTS)
    of_way = {"autoregressive": expected, "self_speculation": drafted}
    assert [output.nfe for output in found] == [of_way[name][i].nfe for i, name in enumerate(told)]


def test_the_engine_chooses_and_learns(llm: LLM):
    """Nothing is known at first, and each choice gives the same tokens."""
    ids = prompts(20, 30)
    expected = [output.token_ids for output in llm.generate(prompt_token_ids=ids, sampling=ONE)]
    for _ in range(3):
        outputs = llm.generate(prompt_token_ids=ids, sampling=LOSSLESS)
        assert [output.token_ids for output in outputs] == expected
        assert all(output.generation_mode in NAMES[:2] for output in outputs)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_way_takes_is_learned(sdar: LLM, name: str, monkeypatch: pytest.MonkeyPatch):
    """It commits less than it might. Requests that say how they generate do not matter."""
    choosing(monkeypatch, name)
    sampling, [ids] = LOSSLESS.changed(**RULE, block_length=8), prompts(12)
    spec, chooses = sdar.spec(ids, sampling), sdar.engine.parts.ways
    assert isinstance(spec, AutoSpec)
    assert chooses is not None
    way = spec.ways[NAMES.index(name)]
    before = chooses.expected(way, 1)
    sdar.generate(prompt_token_ids=[ids], sampling=sampling.changed(generation_mode=None))
    assert chooses.expected(way, 1) == before
    [output] = sdar.generate(prompt_token_ids=[ids], sampling=sampling)
    after = chooses.expected(way, 1)
    assert after.seconds != before.seconds
    tokens = 24 / output.nfe
    assert min(tokens, before.tokens) <= after.tokens <= max(tokens, before.tokens)
    assert name == "autoregressive" or after.tokens < before.tokens


def test_recorded_runs_of_blocks_of_one_position(sdar: LLM, monkeypatch: pytest.MonkeyPatch):
    """What SDAR's own loop gives, but for the end of its texts, which it does not look for here."""
    choosing(monkeypatch, *NAMES[:2])
    runs = [run for run in sdar_runs() if run.sampling.block_length == 1 and not run.sampling.early_stop]
    sampling = [LOSSLESS.changed(gen_length=run.sampling.gen_length) for run in runs for _ in range(2)]
    outputs = sdar.generate(
        prompt_token_ids=[run.prompt for run in runs for _ in range(2)], sampling=sampling
    )
    for run, *found in zip(runs, outputs[::2], outputs[1::2], strict=True):
        assert {output.generation_mode for output in found} == set(NAMES[:2])
        recorded = run.states[-1][len(run.prompt) :].tolist()
        assert [output.token_ids for output in found] == [recorded, recorded]


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_lets_the_engine_fill_blocks(sdar: LLM, name: str, monkeypatch: pytest.MonkeyPatch):
    """Tokens are those of a request for the way that was chosen."""
    choosing(monkeypatch, name)
    ids = prompts(9, 66)
    outputs = sdar.generate(prompt_token_ids=ids, sampling=LOSSLESS.changed(**RULE))
    asked = ONE.changed(block_length=None, **RULE) if name == "diffusion" else ONE
    expected = sdar.generate(prompt_token_ids=ids, sampling=asked)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert {output.generation_mode for output in outputs} == {name}
    if name == "diffusion":
        assert [output.nfe for output in outputs] == [output.nfe for output in expected]
        alone = sdar.generate(prompt_token_ids=ids, sampling=ONE)
        assert [output.token_ids for output in outputs] != [output.token_ids for output in alone]


@pytest.mark.parametrize("name", NAMES[:2])
def test_the_text_ends_where_it_does_at_block_length_1(sdar: LLM, name: str, monkeypatch: pytest.MonkeyPatch):
    choosing(monkeypatch, name)
    [ids] = prompts(20)
    [whole] = sdar.generate(prompt_token_ids=[ids], sampling=ONE)
    stop = whole.token_ids[9]
    sampling = LOSSLESS.changed(early_stop=True, stop_token_ids=[stop], block_length=16)
    [output] = sdar.generate(prompt_token_ids=[ids], sampling=sampling)
    assert output.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("name", NAMES)
def test_updates_are_those_of_the_chosen_way(sdar: LLM, name: str, monkeypatch: pytest.MonkeyPatch):
    choosing(monkeypatch, name)
    [ids] = prompts(21)
    updates = list(sdar.stream(prompt_token_ids=[ids], sampling=LOSSLESS.changed(**RULE, max_tokens=10)))
    steps = [update for update in updates if isinstance(update, StepUpdate)]
    found = np.full(21 + 16, -1)
    for step in steps:
        found[step.positions[step.committed]] = step.provisional[step.committed]
    [output] = sdar.generate(prompt_token_ids=[ids], sampling=LOSSLESS.changed(**RULE, max_tokens=10))
    assert found[21:31].tolist() == output.token_ids
    assert len(output.token_ids) == 10


@pytest.mark.slow
def test_recorded_runs_of_a_causal_context(nemotron: LLM, monkeypatch: pytest.MonkeyPatch):
    choosing(monkeypatch, *NAMES[:2])
    runs = [run for run in autoregressive_runs() for _ in range(2)]
    sampling = [run.sampling.changed(**AUTO) for run in runs]
    outputs = nemotron.generate(prompt_token_ids=[run.prompt for run in runs], sampling=sampling)
    assert [output.token_ids for output in outputs] == [run.output for run in runs]
    assert [output.generation_mode for output in outputs] == NAMES[:2] * (len(runs) // 2)


@pytest.mark.slow
def test_blocks_behind_a_causal_context(nemotron: LLM, monkeypatch: pytest.MonkeyPatch):
    choosing(monkeypatch, "diffusion")
    ids, sampling = prompts(9, 66), LOSSLESS.changed(generation_mode=None, **RULE)
    outputs = nemotron.generate(prompt_token_ids=ids, sampling=sampling.changed(**AUTO))
    expected = nemotron.generate(prompt_token_ids=ids, sampling=sampling)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert {output.generation_mode for output in outputs} == {"diffusion"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"temperature": 1.0}, "leave temperature at 0.0"),
        ({"steps": 24}, "steps is for models that denoise"),
        ({"small_block_length": 2}, "small_block_length is for models that denoise"),
        ({"editing_threshold": 0.5}, "editing_threshold is for models that denoise"),
        ({"presence_penalty": 1.0}, "presence_penalty is for causal models"),
        ({"transfer": "lossy_speculation"}, "verifies drafts in another way"),
        ({"transfer": "adaptive"}, "choose another transfer than 'adaptive'"),
        ({"block_length": 65}, "block_length is 65"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_some_way_does_not_take_is_refused(sdar: LLM, options: dict[str, Any], told: str):
    with pytest.raises(RequestError, match=told):
        sdar.generate(prompt_token_ids=[[1, 2]], sampling=LOSSLESS.changed(**options))


@pytest.mark.parametrize("check", [check_causal, check_denoising])
def test_models_of_one_way_have_no_choice(check: Callable[[SamplingParams], None]):
    with pytest.raises(RequestError, match="this model has one: leave generation_mode out"):
        check(LOSSLESS)


def test_every_way_has_to_have_room(sdar: LLM, build: Build):
    """The last draft reaches beyond the text, into a page of its own."""
    spec = sdar.spec(prompts(104)[0], LOSSLESS)
    assert isinstance(spec, AutoSpec)
    small, large = build(pages=3), build(pages=4)
    lives = [small.parts.costs.life(way.spec) for way in spec.ways]
    assert [life.pages for life in lives] == [2, 3]
    assert small.parts.costs.life(spec) == lives[1]
    small.add(spec.ways[0].spec)
    with pytest.raises(NoRoomError):
        small.add(spec)
    large.add(spec)
