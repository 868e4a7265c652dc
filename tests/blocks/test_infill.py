"""Masks inside the blocks of a text are filled as by evaluations of whole sequences."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.llm import LLM
from jdllm.models.hf_config import config_from_hf
from jdllm.outputs import RequestOutput
from jdllm.serving.modes.registry import mode_of
from jdllm.serving.spec import infill_spec, mask_id_of
from tests.blocks import oracle
from tests.blocks.conftest import scored_of
from tests.blocks.oracle import Logits
from tests.blocks.recorded import FAST_DLLM_V2, LLADA2, SDAR
from tests.blocks.recorded_nemotron import NEMOTRON
from tests.decoding.slow_rules import Rule
from tests.helpers import slow


class Case(NamedTuple):
    """A text of so many tokens with masks at some positions, what is asked, and what the oracle is told."""

    length: int
    masks: list[int]
    asked: Mapping[str, Any] = MappingProxyType({})
    told: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "one mask": Case(21, [6]),
    "several blocks": Case(40, [2, 3, 4, 17, 18, 19, 20, 21, 22, 23]),
    "the end of a text": Case(22, [4, 19, 20, 21]),
    "far apart": Case(150, [9, 10, 11, 140]),
    "all but the first": Case(16, list(range(1, 16))),
    "fewer steps": Case(24, [1, 2, 3, 4, 5, 17, 18], {"steps": 4}, {"steps": 2}),
    "threshold": Case(
        24,
        list(range(3, 22)),
        {"transfer": "threshold", "threshold": 0.3},
        {"rule": Rule.THRESHOLD, "threshold": 0.3},
    ),
    "small blocks": Case(30, [1, 5, 6, 7, 16, 23, 29], {"small_block_length": 4}, {"small": 4}),
}
EDITED = {
    "editing": Case(
        24,
        [2, 3, 4, 5, 17, 18, 20],
        {"editing_threshold": 0.2, "max_post_steps": 3},
        {"editing": 0.2, "post": 3},
    ),
}
LENGTH = 8


def text_of(case: Case, mask_id: int, seed: int = 0) -> np.ndarray:
    text = np.random.default_rng([seed, case.length]).integers(1, 300, case.length).astype(np.int32)
    text[case.masks] = mask_id
    return text


def sampling_of(case: Case) -> SamplingParams:
    return SamplingParams(block_length=LENGTH, return_history=True, **case.asked)


def check(output: RequestOutput, case: Case, logits_of: Logits, llm: LLM) -> None:
    text, shifted = text_of(case, mask_id_of(llm.config)), llm.config.logits_shift
    states = oracle.infill(logits_of, text, LENGTH, mask_id_of(llm.config), foretold=shifted, **case.told)
    assert output.history is not None
    assert len(output.history) == output.nfe == len(states)
    for seen, state in zip(output.history, states, strict=True):
        np.testing.assert_array_equal(seen[: case.length], state[: case.length])
    assert output.token_ids == states[-1][: case.length].tolist()
    given = np.delete(np.arange(case.length), case.masks)
    np.testing.assert_array_equal(np.array(output.token_ids)[given], text[given])


def shifted_logits(logits_of: Logits) -> Logits:
    """The row before predicts a token."""

    def of(tokens: np.ndarray, block_length: int) -> np.ndarray:
        found = logits_of(tokens, block_length)
        return np.concatenate([found[:1], found[:-1]])

    return of


@pytest.mark.parametrize("family", ["sdar", "fast_dllm_v2", slow("llada2")])
def test_alone_and_together(family: str):
    llm, logits_of = scored_of({"sdar": SDAR, "fast_dllm_v2": FAST_DLLM_V2, "llada2": LLADA2}[family])
    if llm.config.logits_shift:
        logits_of = shifted_logits(logits_of)
    cases = list((CASES if llm.config.logits_shift else CASES | EDITED).values())
    texts, sampling = [text_of(case, mask_id_of(llm.config)) for case in cases], list(map(sampling_of, cases))
    for case, output in zip(cases, llm.infill(token_ids=texts, sampling=sampling), strict=True):
        check(output, case, logits_of, llm)
    for case in (CASES["far apart"], CASES["the end of a text"]):
        [output] = llm.infill(token_ids=[text_of(case, mask_id_of(llm.config))], sampling=sampling_of(case))
        check(output, case, logits_of, llm)


def test_a_mask_at_the_beginning():
    llm, logits_of = scored_of(SDAR)
    case = Case(12, [0, 1, 9])
    [output] = llm.infill(token_ids=[text_of(case, mask_id_of(llm.config))], sampling=sampling_of(case))
    check(output, case, logits_of, llm)


def test_nothing_behind_the_block_of_a_mask_is_seen():
    llm = scored_of(SDAR).llm
    text = text_of(Case(30, [9, 10]), mask_id_of(llm.config))
    other = text.copy()
    other[16:] = 5
    one, two = llm.infill(token_ids=[text, other], sampling=SamplingParams(block_length=LENGTH))
    assert one.token_ids[:16] == two.token_ids[:16]
    assert two.token_ids[16:] == [5] * 14
    assert one.nfe == two.nfe == 2


REFUSED: dict[str, tuple[list[int], dict[str, Any], str]] = {
    "no mask": ([1, 2], {}, "nothing to infill: the sequence has no mask id 317"),
    "id": ([1, 317, 400], {}, "400 at position 2 is outside"),
    "stop": ([1, 317], {"stop_token_ids": [5]}, "no end to stop at: leave stop_token_ids out"),
    "stop in a block": ([1, 317], {"stop_in_block": True}, "no end to stop at: leave stop_in_block out"),
    "steps": ([317, 1, 1, 1, 317], {"steps": 3}, "steps 3 is not divisible by the 2 blocks of 4 that have"),
    "block": ([1, 317], {"block_length": 24}, "block_length is 24, expected a divisor of 64"),
    "guidance": ([1, 317], {"cfg_scale": 1.0}, r"leave cfg_scale at 0\.0"),
    "drafts": ([1, 317], {"generation_mode": "self_speculation"}, "self-speculation generates, and fills"),
    "any way": ([1, 317], {"generation_mode": "auto"}, "self-speculation generates, and fills"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str):
    ids, options, message = REFUSED[case]
    with pytest.raises(RequestError, match=message):
        scored_of(SDAR).llm.infill(token_ids=[ids], sampling=SamplingParams(**options))


def test_models_that_fill_nothing_in_before_what_they_need():
    llm = scored_of(FAST_DLLM_V2).llm
    mask_id = mask_id_of(llm.config)
    with pytest.raises(RequestError, match="position 0 is masked: a token of a fast_dllm_v2 model"):
        llm.infill(token_ids=[[mask_id, 1]])
    with pytest.raises(RequestError, match="for models that see whole sequences"):
        infill_spec([1, mask_id], SamplingParams(), llm.config)
    nemotron = config_from_hf(NEMOTRON.directory)
    with pytest.raises(RequestError, match="counts blocks from the end of a prompt: it generates, and fills"):
        mode_of(nemotron).infilling([1, 2], SamplingParams(), nemotron)
