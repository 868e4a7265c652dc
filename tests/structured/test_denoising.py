"""Answers of a given form by models that denoise: random forms and seeds, caches, blocks and company."""

import random
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.llm import LLM
from jdllm.outputs import RequestOutput
from jdllm.serving.denoise.frontier import FrontierRequest
from jdllm.serving.spec import FrontierSpec, generation_spec, infill_spec
from jdllm.structured.structure import Structure
from tests.api.conftest import existing
from tests.conftest import BUDGET, KV_POOL
from tests.helpers import slow
from tests.structured.writing import asking, draw_structure, has_form, write_writing

PROMPT = "ab: "
CACHES: dict[str, dict[str, Any]] = {
    "no cache": {},
    "blocks": {"block_length": 16},
    "prefix": {"cache": "prefix", "block_length": 16},
    "dual": {"cache": "dual", "block_length": 24},
    "window": {"cache": "dual", "block_length": 24, "suffix_window": 8},
}


@pytest.fixture(scope="module", params=["llada", slow("dream")])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    eos = {"llada": 505, "dream": 500}[request.param]
    directory = write_writing(tmp_path_factory.mktemp("writing"), request.param, eos)
    with LLM(directory, dtype="float32", max_num_batched_tokens=BUDGET, kv_pool=KV_POOL) as llm:
        yield llm


def check(llm: LLM, draws: int, first: int, **further: Any) -> int:
    """Run so many random requests together; returns how many of them ended."""
    draw = random.Random(first)
    structures = [draw_structure(draw) for _ in range(draws)]
    asked = [
        asking(structure, gen_length=48, temperature=draw.choice([0.0, 1.0]), seed=first + i, **further)
        for i, structure in enumerate(structures)
    ]
    outputs = llm.generate([PROMPT] * draws, asked)
    for structure, output in zip(structures, outputs, strict=True):
        assert output.text is not None
        assert output.nfe == len(output.token_ids)
        if output.finish_reason == "stop":
            assert has_form(structure, output.text), (structure, output.text)
        else:
            assert len(output.token_ids) == 48
    return sum(output.finish_reason == "stop" for output in outputs)


@pytest.mark.parametrize("case", ["no cache", *map(slow, list(CACHES)[1:])])
def test_what_ends_has_its_form(llm: LLM, case: str):
    assert check(llm, 16, first=100, **CACHES[case]) > 8


@pytest.mark.slow
@pytest.mark.parametrize("case", CACHES)
def test_what_ends_has_its_form_of_many(llm: LLM, case: str):
    assert sum(check(llm, 40, first=1000 * i, **CACHES[case]) for i in range(1, 3)) > 40


@pytest.mark.parametrize("case", ["no cache", slow("dual")])
def test_each_alone_as_in_company(llm: LLM, case: str):
    """The free neighbours get the tokens that they get without company, too."""
    draw, own = random.Random(5), {"gen_length": 48, **CACHES[case]}
    asked = [asking(draw_structure(draw), temperature=1.0, seed=i, **own) for i in range(3)]
    asked += [SamplingParams(temperature=0.7, seed=7, **own), SamplingParams(steps=6, **own)]
    draw.shuffle(asked)
    prompts = [f"{i} asks: " for i in range(len(asked))]
    together = llm.generate(prompts, asked)
    for prompt, one, output in zip(prompts, asked, together, strict=True):
        assert llm.generate(prompt, one)[0].token_ids == output.token_ids


def test_tokens_come_from_the_left(llm: LLM):
    own = asking({"regex": "[a-c]{20}"}, gen_length=32, logprobs=0)
    *steps, told = llm.stream(PROMPT, own)
    assert isinstance(told, RequestOutput)
    assert (told.text or "").strip("abc") == ""
    assert len(told.text or "") == 20
    assert told.outputs[0].committed_in == list(range(len(told.token_ids)))
    assert len(steps) == len(told.token_ids)


def test_the_likeliest_of_what_is_allowed(llm: LLM):
    """Each token is the likeliest of those that go on, with all behind it masked: as where these ids alone
    may fill the masks in one step."""
    [output] = llm.generate(PROMPT, asking({"choice": ["abba", "cab"]}, gen_length=8, return_history=True))
    assert llm.tokenizer is not None
    assert output.history is not None
    text, mask, sequence = "", existing(llm.config.mask_id), [*output.prompt_token_ids]
    for token, state in zip(output.token_ids, output.history, strict=True):
        rest = [one.removeprefix(text) for one in ("abba", "cab") if one.startswith(text)]
        words = {i: llm.tokenizer.token_bytes(i).decode(errors="replace") for i in range(300)}
        going_on = [i for i, word in words.items() if word and any(one.startswith(word) for one in rest)]
        sampling = SamplingParams(allowed_token_ids=tuple(going_on or llm.config.stop_ids), steps=1)
        [filled] = llm.infill(
            token_ids=[[*sequence, *[mask] * (len(state) - len(sequence))]], sampling=sampling
        )
        assert filled.token_ids[len(sequence)] == token == state[len(sequence)]
        assert set(state[len(sequence) + 1 :].tolist()) <= {mask}
        sequence.append(token)
        text += words.get(token, "")
    assert text in ("abba", "cab")


REFUSED: dict[str, dict[str, Any]] = {
    "transfer": {"transfer": "threshold"},
    "alg": {"alg": "entropy"},
    "remasking": {"remasking": "random"},
    "steps": {"steps": 4},
    "confidence_eos_eot_inf": {"confidence_eos_eot_inf": "fixed"},
    "prompt_masks": {"prompt_masks": "official"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_commits_in_another_order(llm: LLM, name: str):
    with pytest.raises(RequestError, match=f"structure commits one token .*: leave {name} "):
        llm.generate(PROMPT, asking({"choice": ["a"]}, gen_length=8, **REFUSED[name]))


def test_what_has_no_form(llm: LLM):
    asked = SamplingParams(structure=Structure(choice=("a",)), gen_length=8)
    with pytest.raises(RequestError, match="structure is for answers, which have an end"):
        infill_spec([5, existing(llm.config.mask_id)], asked, llm.config)
    with pytest.raises(RequestError, match="structure needs a compiled grammar"):
        llm.engine.add(generation_spec([5, 6], asked, llm.config))


def test_a_lost_pool_takes_the_grammar_back(llm: LLM):
    """Steps behind the last refresh are repeated, and the grammar follows the answer as it stands."""
    own = asking({"regex": "a[bc]d"}, gen_length=8, cache="dual")
    request = FrontierRequest(cast(FrontierSpec, llm.spec([5, 6], own)))
    matcher, places = existing(request.matcher), np.arange(2, 10)
    first = matcher.allowed()
    request.advance(places[:1], np.array([97]), np.zeros(1, np.float32))
    second = existing(request.matcher).allowed()
    request.store(places, 10)
    request.advance(places[1:2], np.array([98]), np.zeros(1, np.float32))
    assert not np.array_equal(existing(request.matcher).allowed(), second)
    request.go_back()
    assert request.candidates().tolist() == [3]
    assert np.array_equal(existing(request.matcher).allowed(), second)
    assert not np.array_equal(first, second)
