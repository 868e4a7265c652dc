"""Answers of a given form by a causal model with random weights: random forms and seeds."""

import dataclasses
import json
import random
import time
from collections.abc import Iterable
from typing import Any, cast

import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.llm import LLM
from jdllm.outputs import RequestOutput
from jdllm.serving.updates import Ended
from jdllm.structured.matching import Grammar, Mask, Matcher
from jdllm.structured.structure import Structure
from tests.api.conftest import existing
from tests.structured.writing import asking, draw_structure, has_form

PROMPT = "An answer: "
DRAWN = {"temperature": 1.0, "max_tokens": 48}


def check(llm: LLM, draws: int, first: int) -> int:
    """Run so many random requests together; returns how many of them ended."""
    draw = random.Random(first)
    structures = [draw_structure(draw) for _ in range(draws)]
    asked = [
        asking(structure, **DRAWN, seed=first + i, top_p=draw.choice([None, 0.9]))
        for i, structure in enumerate(structures)
    ]
    outputs = llm.generate([PROMPT] * draws, asked)
    for structure, output in zip(structures, outputs, strict=True):
        assert output.text is not None
        if output.finish_reason == "stop":
            assert has_form(structure, output.text), (structure, output.text)
    return sum(output.finish_reason == "stop" for output in outputs)


def test_what_ends_has_its_form(llm: LLM):
    assert check(llm, 40, first=0) > 20


@pytest.mark.slow
def test_what_ends_has_its_form_of_many(llm: LLM):
    assert sum(check(llm, 50, first=1000 * i) for i in range(1, 9)) > 200


def test_each_alone_as_in_company(llm: LLM):
    """The free neighbours get the tokens that they get without company, too."""
    draw = random.Random(5)
    asked = [asking(draw_structure(draw), **DRAWN, seed=i) for i in range(4)]
    asked += [
        SamplingParams(**DRAWN, seed=7),
        SamplingParams(max_tokens=30),
        SamplingParams(**DRAWN, min_p=0.1),
    ]
    draw.shuffle(asked)
    prompts = [f"{i} asks: " for i in range(len(asked))]
    together = llm.generate(prompts, asked)
    for prompt, own, output in zip(prompts, asked, together, strict=True):
        assert llm.generate(prompt, own)[0].token_ids == output.token_ids


def test_a_step_at_a_time(llm: LLM):
    """Streams show the same tokens, and penalties and biases go with a structure."""
    three = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}
    structure = {"json_schema": three}
    own = asking(structure, **DRAWN, repetition_penalty=1.3, logit_bias={256: 3.0}, seed=2)
    [expected] = llm.generate(PROMPT, own)
    *steps, told = llm.stream(PROMPT, own)
    assert isinstance(told, RequestOutput)
    assert told.token_ids == expected.token_ids
    assert len(steps) == len(expected.token_ids)
    assert json.loads(told.text or "") in [
        [a, b, c] for a in (True, False) for b in (True, False) for c in (True, False)
    ]


def test_log_probabilities_are_of_what_is_allowed(llm: LLM):
    own = asking({"choice": ["yes"]}, logprobs=3, max_tokens=8)
    [output] = llm.generate(PROMPT, own)
    assert output.text == "yes"
    assert (output.logprobs or [])[-1] == pytest.approx(0, abs=1e-6)
    assert llm.tokenizer is not None
    for top in output.top_logprobs or []:
        assert top is not None
        assert all("yes".find((llm.tokenizer.token_bytes(i)).decode()) >= 0 or i == 500 for i in top)


def test_what_is_cut_goes_on(llm: LLM):
    """An answer of half the tokens is the first half of the whole answer, which has the form."""
    structure = {
        "json_schema": {"type": "array", "items": {"enum": ["abc", 10]}, "minItems": 6, "maxItems": 6}
    }
    [whole] = llm.generate(PROMPT, asking(structure, max_tokens=80, temperature=1.0))
    [cut] = llm.generate(PROMPT, asking(structure, max_tokens=9, temperature=1.0))
    assert (whole.finish_reason, cut.finish_reason) == ("stop", "length")
    assert has_form(structure, whole.text or "")
    assert whole.token_ids[:9] == cut.token_ids


def optional(count: int) -> dict[str, Any]:
    """A grammar of an x and so many letters, each of which may be left out."""
    names = [f"A{i}" for i in range(count)]
    rules = "".join(f"{name}: /[ab]+/\n" for name in names)
    return {"grammar": f'start: "x" {" ".join(f"{name}?" for name in names)}\n{rules}'}


def test_a_structure_that_cannot_go_on_fails_alone(llm: LLM):
    """It is too much work behind its first token; who runs beside it does not notice."""
    hostile = asking(optional(2500), max_tokens=8)
    specs = [llm.spec([5, 6, 7], sampling) for sampling in (SamplingParams(max_tokens=8), hostile)]
    ended = [update for update in llm.engine.run(specs) if isinstance(update, Ended)]
    free, failed = sorted(ended, key=lambda update: update.request)
    assert free.error is None
    assert isinstance(failed.error, RequestError)
    assert str(failed.error).startswith("structure cannot be followed any further: Parser Error: ")
    assert llm.generate(PROMPT, asking({"choice": ["no"]}))[0].text == "no"


def test_who_waits_for_a_grammar_is_waited_for_beside_others(llm: LLM):
    """A matcher that takes its time for each token: the others end before, and tokens are the same."""
    structure, free = Structure(regex="[ab]{6}"), SamplingParams(max_tokens=40, early_stop=False)
    own = SamplingParams(structure=structure, temperature=1.0, max_tokens=8, seed=4)
    [expected] = llm.generate(PROMPT, own)
    ids = llm.spec([5], free).prompt
    spec = llm.spec(expected.prompt_token_ids, own)
    slow = dataclasses.replace(spec, grammar=cast(Grammar, _Slow(existing(spec.grammar))))
    order = [u for u in llm.engine.run([slow, llm.spec(ids, free)]) if isinstance(u, Ended)]
    assert [update.request for update in order] == [1, 0]
    state = order[1].state
    assert state.tokens[state.returned][: len(expected.token_ids)].tolist() == expected.token_ids


class _Slow:
    """A grammar whose matchers take their time."""

    def __init__(self, grammar: Grammar):
        self._grammar = grammar

    def matcher(self) -> Matcher:
        return _SlowMatcher(self._grammar.matcher())


class _SlowMatcher(Matcher):
    def __init__(self, quick: Matcher):
        self._quick, self._due = quick, 0.0

    def ready(self, patience: float) -> bool:
        return time.monotonic() > self._due

    def allowed(self) -> Mask:
        return self._quick.allowed()

    def take(self, tokens: Iterable[int]) -> None:
        self._quick.take(tokens)
        self._due = time.monotonic() + 0.3
