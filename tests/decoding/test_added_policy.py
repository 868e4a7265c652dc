"""A cache policy from outside the package: one declaration, and everything knows it."""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from jdllm.cli.generate import generate
from jdllm.decoding.cache_policies import Phase, phase
from jdllm.decoding.caches.policy import CachePolicy, View
from jdllm.decoding.kinds import Step
from jdllm.decoding.option import Option
from jdllm.decoding.registry import register, unregister
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import ConfigError, RequestError
from jdllm.llm import LLM
from tests.decoding import oracle
from tests.decoding.test_against_oracle import IDS, check, logits_of, prompts, sampled


class Far(CachePolicy):
    """Everything that is farther from the block than some positions."""

    def candidates(self, view: View) -> np.ndarray:
        margin = view.options["margin"]
        return np.concatenate(
            [np.arange(max(view.start - margin, 0)), np.arange(view.stop + margin, view.length)]
        )


MARGIN = Option("margin", Step, 4, "positions around the block that are never stored.")
POLICY = Far("far", "what is farther from the block than `margin`", interval=2, own=(MARGIN,))


def asked(**options: Any) -> SamplingParams:
    """Options that type checkers do not know."""
    return SamplingParams(**options)


@pytest.fixture
def policy() -> Iterator[CachePolicy]:
    register(POLICY)
    yield POLICY
    unregister(POLICY)


@pytest.mark.slow
@pytest.mark.usefixtures("policy")
def test_with_nothing_stored_its_steps_are_exact(stopping_llm: LLM):
    sampling, ids = sampled(cache="far", margin=100, block_length=4), prompts(2, seed=7)
    outputs = stopping_llm.generate(prompt_token_ids=ids, sampling=sampling)
    logits = logits_of(stopping_llm)
    check(outputs, [oracle.generate(logits, x, sampling, IDS) for x in ids])


@pytest.mark.usefixtures("policy")
def test_without_a_margin_it_is_the_dual_cache(stopping_llm: LLM):
    ids = prompts(2, seed=8)
    histories = []
    owns: list[dict[str, Any]] = [{"cache": "far", "margin": 0}, {"cache": "dual"}]
    for own in owns:
        outputs = stopping_llm.generate(
            prompt_token_ids=ids, sampling=sampled(refresh_interval=2, block_length=4, **own)
        )
        histories.append([output.history for output in outputs])
    for far, dual in zip(*histories, strict=True):
        np.testing.assert_array_equal(far, dual)


@pytest.mark.usefixtures("policy")
def test_its_declaration_decides():
    sampling = SamplingParams(cache="far", gen_length=8)
    assert [phase(sampling, step) for step in range(4)] == [
        Phase.REFRESH, Phase.REUSE, Phase.REFRESH, Phase.REUSE
    ]  # fmt: skip
    view = View(20, 8, 12, np.zeros(20, bool), False, sampling.options)
    np.testing.assert_array_equal(POLICY.candidates(view), [0, 1, 2, 3, 16, 17, 18, 19])
    with pytest.raises(RequestError, match=r"^margin has no effect here: it needs cache 'far'$"):
        asked(cache="dual", margin=3)
    with pytest.raises(RequestError, match=r"^margin is -1, expected an integer from 0 to "):
        asked(cache="far", margin=-1)


@pytest.mark.usefixtures("policy")
def test_the_command_line_and_schemas_have_it():
    parameters = inspect.signature(generate).parameters
    option = parameters["margin"].annotation.__metadata__[0]
    assert option.help == "Positions around the block that are never stored. [default: 4]"
    assert parameters["cache"].annotation.__metadata__[0].metavar.endswith("|far")
    assert TypeAdapter(SamplingParams).json_schema()["properties"]["cache"]["enum"][-1] == "far"


def test_a_name_is_given_once(policy: CachePolicy):
    for name in (policy.name, "none"):
        with pytest.raises(ConfigError, match=f"cache '{name}' is registered already"):
            register(dataclasses.replace(policy, name=name))


def test_what_is_unregistered_is_unknown():
    register(POLICY)
    unregister(POLICY)
    assert "margin" not in inspect.signature(generate).parameters
    with pytest.raises(RequestError, match=r"^cache is 'far', expected one of 'none', 'prefix', "):
        asked(cache="far")
    with pytest.raises(RequestError, match=r"^there is no parameter margin$"):
        asked(margin=3)
