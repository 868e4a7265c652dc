"""The prompt cache against a model that evaluates the prompt alone, and then all other rows against it."""

from typing import Any

import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.demands import Kind
from jdllm.serving.updates import Ended
from tests.conftest import DREAM, LLADA
from tests.decoding import oracle
from tests.decoding.test_against_oracle import check, prompts, sampled
from tests.engines import engine_of, finish, generation_request
from tests.helpers import slow
from tests.prefilling.oracle_model import forward, load
from tests.serving.test_engine import Failing, submitted
from tests.serving.test_suffix_window import IDS, kept_rows

GENERATED, BLOCK = 16, 4


class PromptAlone:
    """The logits of each step of one request in float64.

    Arguments:
    - `family`: of the tiny model.
    - `sequence`: ids at the start; the prompt ends before the first mask. With shifted logits its last row
      predicts a token, so this row is not of the prompt.
    - `window`: masks behind the block that are evaluated; `None` for all.
    """

    def __init__(self, family: str, sequence: np.ndarray, window: int | None = None):
        self.model = load({"llada": LLADA, "dream": DREAM}[family].directory)
        self.mask, self.window = IDS[family].mask, window
        self.first = int((sequence == self.mask).argmax())
        self.stored = max(self.first - IDS[family].shift, 0)
        alone = np.arange(self.stored)
        self.cache = forward(self.model, sequence[: self.stored], alone).cache if self.stored else None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        masked = x == self.mask
        rows = np.arange(len(x))
        if self.window is not None:
            block = (int(masked.argmax()) - self.first) // BLOCK
            rows = np.array(kept_rows(masked.tolist(), self.first + (block + 1) * BLOCK, self.window))
        fresh = rows[rows >= self.stored]
        found = forward(self.model, x[fresh], rows, cache=self.cache).logits
        logits = np.full((len(x), found.shape[1]), np.nan)
        logits[fresh] = found
        return logits


def asked(**options: Any) -> SamplingParams:
    return sampled(gen_length=GENERATED, block_length=BLOCK, cache="prompt", **options)


def model_of(family: str, request: pytest.FixtureRequest) -> LLM:
    return request.getfixturevalue("llm" if family == "llada" else "dream_llm")


def expected(family: str, prompt: np.ndarray, sampling: SamplingParams) -> list[np.ndarray]:
    ids = IDS[family]
    sequence = np.append(prompt, np.full(GENERATED, ids.mask))
    model = PromptAlone(family, sequence, sampling.suffix_window)
    return oracle.generate(model, prompt, sampling, ids)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"transfer": "threshold", "threshold": 0.3},
    {"temperature": 0.7, "seed": 4},
    {"suffix_window": 2},
]
OTHERS = [
    sampled(gen_length=GENERATED, block_length=BLOCK, **options)
    for options in ({"cache": "dual"}, {"cache": "head_sparse", "retention": 0.6}, {"cfg_scale": 0.8})
]


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("company", [False, slow(True)])
def test_each_step_sees_the_prompt_as_it_is_alone(family: str, company: bool, request: pytest.FixtureRequest):
    sampling = [asked(**options) for options in SETTINGS]
    ids = prompts(len(sampling), seed=9)
    others = OTHERS if company else []
    outputs = model_of(family, request).generate(
        prompt_token_ids=[*prompts(len(others), seed=3), *ids], sampling=[*others, *sampling]
    )
    check(
        outputs[len(others) :],
        [expected(family, prompt, one) for prompt, one in zip(ids, sampling, strict=True)],
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("given", [0, 5])
def test_an_infilling_has_the_prompt_before_its_first_mask(
    family: str, given: int, request: pytest.FixtureRequest
):
    """Without such a prompt nothing is stored, and every step is exact."""
    mask, sampling = IDS[family].mask, sampled(block_length=2, cache="prompt")
    sequence = np.random.default_rng(5).integers(0, 500, 30)
    sequence[[given, 9, 14, 15, 22, 29]] = mask
    outputs = model_of(family, request).infill(token_ids=[sequence], sampling=sampling)
    check(outputs, [oracle.infill(PromptAlone(family, sequence), sequence, sampling, IDS[family])])


def test_only_the_first_step_of_a_request_refreshes(
    params: Params, config: ModelConfig, executables: Executables, monkeypatch: pytest.MonkeyPatch
):
    engine = engine_of(params, config, executables, 64)
    parts = submitted(engine, monkeypatch)
    finish(engine, [generation_request(0, np.arange(9), asked(), config)])
    assert parts == [(Kind.REFRESH, [9], 1), (Kind.REUSE, [9], 3), *[(Kind.REUSE, [9], 4)] * 3]


def test_after_a_lost_pool_the_steps_are_the_same(
    params: Params, config: ModelConfig, executables: Executables, monkeypatch: pytest.MonkeyPatch
):
    """The refresh of another request fails in the second block, and takes the pool with it."""
    engine = engine_of(params, config, executables, 64)
    sampling = asked()
    request, other = (generation_request(i, np.arange(9 + i), sampling, config) for i in range(2))
    ended: dict[int, Ended] = {}

    def deliver(update: object) -> None:
        if isinstance(update, Ended):
            ended[update.request] = update

    number = engine.add(request.spec, updates="every", deliver=deliver)
    while engine.stats().evaluated < BLOCK + 2:
        engine.step()
    failing = Failing(engine, Kind.REFRESH, monkeypatch)
    failing.left = 1
    lost = engine.add(other.spec, deliver=deliver)
    while not engine.idle:
        engine.step()
    assert ended[lost].error is not None
    assert engine.stats().rebuilt == 1
    states = expected("llada", request.prompt, sampling)
    np.testing.assert_array_equal(ended[number].state.history, states)
