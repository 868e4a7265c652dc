"""Block models verify what they draft as recorded (S2D2), and as a slow loop over whole sequences does."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jdllm.checkpoints.loading import load_params
from jdllm.decoding.causal_sampling import check_causal, check_denoising
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.blocks.context_request import check_context
from jdllm.serving.blocks.request import BlockRequest, block_spec
from jdllm.serving.engine import Engine
from jdllm.serving.request import Request
from jdllm.serving.spec import mask_id_of
from jdllm.serving.speculation.lossy_request import LossyRequest, lossy_spec
from tests.blocks.conftest import seen_sequences
from tests.blocks.lossy_oracle import Lossy, SeenLogits
from tests.blocks.recorded import LLADA2
from tests.blocks.recorded_lossy import Accepting, LossyRun, lossy_runs, recorded_draws
from tests.engines import engine_of, finish

RUNS = lossy_runs()
QUICK = ("s2d2_b8_hyst", "s2d2_b4_c1", "s2d2_b8_s4_high")
LOSSY: dict[str, Any] = {"transfer": "lossy_speculation", "early_stop": False, "return_history": True}
ASKED: list[tuple[int, dict[str, Any]]] = [
    (5, {"block_length": 4, "gen_length": 30, "seed": 9}),
    (61, {"block_length": 8, "gen_length": 21, "verify_sharpness": 0.2, "verify_cost": 2.0, "seed": 10}),
    (130, {"block_length": 16, "gen_length": 40, "causal_rows": True, "verify_cost": 0.0, "seed": 2**40 + 1}),
    (64, {"block_length": 8, "gen_length": 24, "steps": 6, "verify_policy": "span", "verify_span": 3}),
    (16, {"block_length": 16, "gen_length": 32, "steps": 8, "threshold": 0.1, "commit_sure": True}),
    (7, {"block_length": 32, "gen_length": 40, "verify_policy": "hysteresis", "threshold": 0.3}),
]
"""Lengths of prompts, and what is asked."""

ORDINARY = SamplingParams(gen_length=20, early_stop=False)


def prompt(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, 300, length).astype(np.int32)


def request_of(ids: np.ndarray, sampling: SamplingParams, config: ModelConfig) -> LossyRequest:
    return LossyRequest(lossy_spec(ids, sampling, config))


def asked_of(length: int, options: dict[str, Any], config: ModelConfig) -> LossyRequest:
    return request_of(prompt(length), SamplingParams(**{"seed": 99, **LOSSY, **options}), config)


@pytest.fixture(scope="module")
def engine(params: Params, config: ModelConfig) -> Engine:
    """Few rows: few sizes to compile."""
    return engine_of(params, config, Accepting(recorded_draws(RUNS)), 64, pages=60)


@pytest.fixture(scope="module")
def seen_logits(params: Params, config: ModelConfig) -> SeenLogits:
    return seen_sequences(params, config)


@pytest.fixture(scope="module")
def together(engine: Engine, config: ModelConfig) -> Sequence[Request]:
    """All recorded runs, all that is asked beside them, and a request that verifies nothing."""
    requests: list[Request] = [request_of(run.prompt, run.sampling, config) for run in RUNS]
    requests += [asked_of(*each, config) for each in ASKED]
    requests.append(BlockRequest(block_spec(prompt(30), ORDINARY, config)))
    return finish(engine, requests)[1]


def check(request: Request, run: LossyRun) -> None:
    np.testing.assert_array_equal(np.array(request.history), run.states, err_msg=run.name)


def test_recorded_runs_in_one_batch(engine: Engine, config: ModelConfig):
    """Those with a cheap draft; the slow lane has all."""
    runs = [run for run in RUNS if run.name in QUICK]
    requests = finish(engine, [request_of(run.prompt, run.sampling, config) for run in runs])[1]
    for request, run in zip(requests, runs, strict=True):
        check(request, run)


@pytest.mark.slow
def test_recorded_runs_together(together: Sequence[Request]):
    assert len(RUNS) == 9
    for request, run in zip(together, RUNS, strict=False):
        check(request, run)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_recorded_runs_alone(engine: Engine, together: Sequence[Request], config: ModelConfig, run: LossyRun):
    """Behind those together, whose executables serve these."""
    [request] = finish(engine, [request_of(run.prompt, run.sampling, config)])[1]
    check(request, run)


@pytest.mark.slow
def test_a_slow_loop_over_whole_sequences(
    together: Sequence[Request], seen_logits: SeenLogits, config: ModelConfig
):
    """Prompts across pages, draws keyed by seed, step and position, other options than those recorded."""
    verified = 0
    for request in together[len(RUNS) : -1]:
        length = request.sampling.block_length or 0
        states = list(
            Lossy(seen_logits, request.sampling, length, mask_id_of(config)).generate(request.prompt)
        )
        np.testing.assert_array_equal(np.array(request.history), states)
        assert request.steps == len(states)
        verified += sum((a == b).all() for a, b in zip(states[1:], states[:-1], strict=True))
    assert verified > 20


@pytest.mark.slow
@pytest.mark.parametrize("updates", ["none", "every"])
def test_company_changes_nothing(
    engine: Engine, together: Sequence[Request], config: ModelConfig, updates: Any
):
    for each, beside in zip(ASKED, together[len(RUNS) : -1], strict=True):
        told, [request] = finish(engine, [asked_of(*each, config)], updates=updates)
        np.testing.assert_array_equal(np.array(request.history), np.array(beside.history))
        committed = [position for update in told for position in update.positions[update.committed]]
        if updates == "every":
            assert sorted(committed) == np.flatnonzero(request.initial_masks).tolist()
    ordinary = BlockRequest(block_spec(prompt(30), ORDINARY, config))
    [alone] = finish(engine, [ordinary])[1]
    np.testing.assert_array_equal(alone.tokens, together[-1].tokens)


@pytest.mark.slow
@pytest.mark.parametrize("in_block", [False, True])
def test_the_text_ends(engine: Engine, together: Sequence[Request], config: ModelConfig, in_block: bool):
    """With the step that completes the text, or with its block; the steps before are the same."""
    length, options = ASKED[5]
    whole = together[-2]
    answer = whole.tokens[whole.returned].tolist()
    stop = next(token for token in answer if answer.index(token) in range(12, 20))
    ends = {"early_stop": True, "stop_in_block": in_block, "stop_token_ids": stop}
    [request] = finish(engine, [asked_of(length, options | ends, config)])[1]
    states = np.array(whole.history)
    filled = length + answer.index(stop) + 1 if in_block else options["block_length"]
    count = 1 + int((states[:, :filled] != mask_id_of(config)).all(axis=1).argmax())
    np.testing.assert_array_equal(np.array(request.history), states[:count])
    assert count < len(states)


@pytest.mark.slow
def test_a_slow_loop_of_llada2(llada2: LLM):
    """With `LLM`, in company of the lossless way."""
    params = load_params(LLADA2.directory, llada2.config, "float32")
    seen_logits, mask_id = seen_sequences(params, llada2.config), mask_id_of(llada2.config)
    asked = [SamplingParams(**(LOSSY | options)) for _, options in ASKED]
    ids, lossless = (
        [prompt(length) for length, _ in ASKED],
        ORDINARY.changed(generation_mode="self_speculation"),
    )
    *outputs, beside = llada2.generate(prompt_token_ids=[*ids, prompt(9)], sampling=[*asked, lossless])
    for one, sampling, output in zip(ids, asked, outputs, strict=True):
        states = list(Lossy(seen_logits, sampling, sampling.block_length or 0, mask_id).generate(one))
        np.testing.assert_array_equal(np.array(output.history), states)
    assert beside.token_ids == llada2.generate(prompt_token_ids=[prompt(9)], sampling=lossless)[0].token_ids


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"temperature": 1.0},
            "'lossy_speculation' takes the likeliest tokens as its draft: leave temperature",
        ),
        ({"small_block_length": 2}, "drafts and verifies whole blocks: leave small_block_length at None"),
        ({"editing_threshold": 0.5}, "corrects no token: leave editing_threshold at None"),
        ({"confidence_dtype": "model"}, "accepts tokens by their probability: leave confidence_dtype"),
        ({"remasking": "random"}, "transfer 'lossy_speculation' brings its own order"),
        ({"generation_mode": "self_speculation"}, "verifies drafts in another way than self-speculation"),
        (
            {"verify_policy": "always"},
            "verify_policy is 'always', expected one of 'score', 'hysteresis', 'span' or None",
        ),
        ({"transfer": "dynamic", "verify_span": 4}, "verify_span has no effect here: it needs transfer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused(sdar: LLM, options: dict[str, Any], told: str):
    with pytest.raises(RequestError, match=told):
        sdar.generate(prompt_token_ids=[[1, 2]], sampling=SamplingParams(**(LOSSY | options)))


def test_refused_by_other_models(sdar: LLM, fast_dllm_v2: LLM):
    sampling = SamplingParams(transfer="lossy_speculation")
    with pytest.raises(RequestError, match="those of fast_dllm_v2 models predict the token behind them"):
        fast_dllm_v2.generate(prompt_token_ids=[[1, 2]], sampling=sampling)
    with pytest.raises(RequestError, match="generates, and fills nothing in: choose another transfer"):
        sdar.infill(token_ids=[[1, mask_id_of(sdar.config)]], sampling=sampling)
    for check_model, told in {
        check_denoising: "transfer 'lossy_speculation' is for block models",
        check_context: "transfer 'lossy_speculation' is for models without a causal context",
        check_causal: "transfer is for models that denoise",
    }.items():
        with pytest.raises(RequestError, match=told):
            check_model(sampling)
