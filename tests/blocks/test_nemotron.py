"""Nemotron-Labs-Diffusion: each request chooses its way of generating."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jdllm.checkpoints.conversion import to_native
from jdllm.checkpoints.loading import load_params
from jdllm.decoding.block_sampling import check_blocks
from jdllm.decoding.causal_sampling import check_causal, check_denoising
from jdllm.decoding.sampling import GenerationMode, SamplingParams
from jdllm.errors import RequestError
from jdllm.execution.transformer import forward, logits
from jdllm.llm import LLM
from jdllm.models.block import Rows
from jdllm.models.hf_config import config_from_hf
from jdllm.outputs import RequestOutput
from jdllm.serving.demands import Kind
from jdllm.serving.updates import PartDone, StepUpdate
from tests.blocks import context_oracle, recorded
from tests.blocks.conftest import seen_sequences
from tests.blocks.context_oracle import Logits, both_ways
from tests.blocks.recorded import Run
from tests.blocks.recorded_nemotron import (
    MASK,
    NEMOTRON,
    Generated,
    autoregressive_runs,
    diffusion_runs,
    speculative_runs,
)
from tests.helpers import slow

AUTOREGRESSIVE, DIFFUSION, BIDIRECTIONAL = (
    autoregressive_runs(),
    diffusion_runs(),
    diffusion_runs(causal=False),
)
SPECULATIVE, ADAPTED = (speculative_runs(adapter=adapter) for adapter in (False, True))
SPECULATION: dict[str, Any] = {"generation_mode": "self_speculation"}
FREE = SamplingParams(gen_length=16, early_stop=False, return_history=True)
SIZES: dict[str, Any] = {"max_num_batched_tokens": 256, "kv_pool": "8MiB", "progress": False}
BUCKET = 384


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(NEMOTRON.directory, plain_drafts=True, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def adapted() -> Iterator[LLM]:
    with LLM(NEMOTRON.directory, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def logits_of() -> Logits:
    config = config_from_hf(NEMOTRON.directory)
    params = load_params(NEMOTRON.directory, config, "float32")

    @jax.jit
    def run(tokens: jax.Array, rows: Rows) -> jax.Array:
        return logits(params, config, forward(params, config, tokens, rows))

    def of(tokens: np.ndarray, causal: int) -> np.ndarray:
        position, length = np.arange(BUCKET), len(tokens)
        end = np.where(position < causal, position + 1, length)
        rows = Rows(position, np.zeros(BUCKET, int), np.where(position < length, end, 0))
        return np.asarray(run(np.pad(tokens, (0, BUCKET - length)), rows))[:length]

    return of


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, length]).integers(200, 320, length).astype(np.int32)


def check(output: RequestOutput, run: Generated | Run) -> None:
    if isinstance(run, Run):
        recorded.check(output, run, MASK)
    else:
        assert (output.token_ids, output.nfe) == (run.output, run.nfe), run.name


def test_all_runs_but_those_with_a_thinking_budget():
    assert [run.name for run in AUTOREGRESSIVE] == ["ar_p9", "ar_p40", "ar_eos"]
    assert (len(DIFFUSION), len(BIDIRECTIONAL), len(SPECULATIVE), len(ADAPTED)) == (10, 1, 6, 4)


@pytest.mark.parametrize(
    "run",
    [
        *AUTOREGRESSIVE,
        *BIDIRECTIONAL,
        *(run if i % 3 == 0 else slow(run) for i, run in enumerate([*DIFFUSION, *SPECULATIVE])),
    ],
    ids=lambda run: run.name,
)
def test_alone(llm: LLM, run: Generated | Run):
    [output] = llm.generate(prompt_token_ids=[run.prompt], sampling=run.sampling)
    check(output, run)


def test_all_together(llm: LLM):
    runs = [*AUTOREGRESSIVE, *DIFFUSION, *BIDIRECTIONAL, *SPECULATIVE]
    prompts, sampling = [run.prompt for run in runs], [run.sampling for run in runs]
    for output, run in zip(llm.generate(prompt_token_ids=prompts, sampling=sampling), runs, strict=True):
        check(output, run)


@pytest.mark.parametrize("run", [ADAPTED[1], *map(slow, ADAPTED[2:])], ids=lambda run: run.name)
def test_drafts_with_the_adapter(adapted: LLM, run: Generated):
    """Other drafts are accepted than without it, so the evaluations are others."""
    [output] = adapted.generate(prompt_token_ids=[run.prompt], sampling=run.sampling)
    check(output, run)


def test_drafts_with_the_adapter_together_with_other_modes(adapted: LLM):
    runs = [*ADAPTED, *AUTOREGRESSIVE, *DIFFUSION[::3]]
    prompts, sampling = [run.prompt for run in runs], [run.sampling for run in runs]
    for output, run in zip(adapted.generate(prompt_token_ids=prompts, sampling=sampling), runs, strict=True):
        check(output, run)


def test_a_converted_model_drafts_with_the_adapter(tmp_path: Path):
    to_native(NEMOTRON.directory, tmp_path / "native")
    run = ADAPTED[1]
    with LLM(tmp_path / "native", **SIZES) as llm:
        [output] = llm.generate(prompt_token_ids=[run.prompt], sampling=run.sampling)
    check(output, run)


def test_a_checkpoint_without_the_adapter_does_not_draft(tmp_path: Path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(NEMOTRON.directory / name)
    with LLM(tmp_path, **SIZES) as llm:
        with pytest.raises(RequestError, match=r"without one .* load the model with plain_drafts=True"):
            llm.generate(prompt_token_ids=[[1, 2]], sampling=SamplingParams(**SPECULATION))
        [output] = llm.generate(prompt_token_ids=[[1, 2]], sampling=FREE)
        assert len(output.token_ids) == 16


@pytest.mark.parametrize("threshold", [None, 0.3])
def test_long_prompts_in_parts(llm: LLM, logits_of: Logits, threshold: float | None):
    """Prompts that begin alike, in parts of 192 rows, and blocks of several lengths across pages."""
    rule = {"transfer": "threshold", "threshold": threshold} if threshold else {}
    system, lengths = prompt(200), [(5, 8), (30, 16), (0, 1), (40, 3)]
    asked = [(np.append(system, prompt(n, 1)), FREE.changed(block_length=b, **rule)) for n, b in lengths]
    outputs = llm.generate(prompt_token_ids=[ids for ids, _ in asked], sampling=[one for _, one in asked])
    for output, (ids, _), (_, length) in zip(outputs, asked, lengths, strict=True):
        given = logits_of, ids, -(-16 // length), length, MASK, threshold
        np.testing.assert_array_equal(output.history, context_oracle.generate(*given))


@pytest.mark.parametrize("threshold", [None, slow(0.3)])
def test_contexts_that_are_not_causal(llm: LLM, threshold: float | None):
    """Prompts across pages, twice: then their full pages are there, and blocks do not depend on others'."""
    rule = {"transfer": "threshold", "threshold": threshold} if threshold else {}
    asked = [(prompt(n, 5), length) for n, length in [(190, 16), (64, 8), (1, 3), (125, 8)]]
    sampling = [FREE.changed(generation_mode="bidirectional", block_length=b, **rule) for _, b in asked]
    params = load_params(NEMOTRON.directory, llm.config, "float32")
    seen, turns = seen_sequences(params, llm.config), []
    for _ in range(2):
        outputs = llm.generate(prompt_token_ids=[ids for ids, _ in asked], sampling=sampling)
        for output, (ids, length) in zip(outputs, asked, strict=True):
            given = both_ways(seen, len(ids), length), ids, -(-16 // length), length, MASK, threshold
            expected = context_oracle.generate(*given, foretold=False)
            np.testing.assert_array_equal(output.history, expected)
        turns.append([output.num_cached_tokens for output in outputs])
    assert turns == [[0, 0, 0, 0], [128, 0, 0, 64]]
    [causal] = llm.generate(prompt_token_ids=[asked[0][0]], sampling=FREE)
    assert causal.num_cached_tokens == 0


def test_prompts_that_one_part_does_not_hold(llm: LLM):
    bidirectional = FREE.changed(generation_mode="bidirectional")
    with pytest.raises(RequestError, match="takes 193 rows, and a part has at most 192: shorten the prompt"):
        llm.generate(prompt_token_ids=[prompt(193)], sampling=bidirectional)
    with pytest.raises(RequestError, match="generation_mode is 'bidirectional', expected 'diffusion', "):
        check_blocks(bidirectional)


def test_both_ways_share_what_is_stored(llm: LLM):
    """Rows of a finished text are the same, whichever way has generated it."""
    ids, diffusion = prompt(100, 2), SamplingParams(gen_length=32, early_stop=False)
    autoregressive = diffusion.changed(generation_mode="autoregressive")
    [whole] = llm.generate(prompt_token_ids=[ids], sampling=diffusion)
    turn = np.concatenate([ids, whole.token_ids, prompt(9, 3)])
    outputs = llm.generate(prompt_token_ids=[turn], sampling=autoregressive)
    outputs += llm.generate(prompt_token_ids=[turn], sampling=diffusion)
    assert [output.num_cached_tokens for output in outputs] == [64, 128]
    fresh = [turn[:64] - 1, turn[64:]]
    [alone] = llm.generate(prompt_token_ids=[np.concatenate(fresh)], sampling=autoregressive)
    assert alone.num_cached_tokens == 0


def test_blocks_of_one_position_are_autoregressive(llm: LLM):
    one = FREE.changed(block_length=1)
    [output] = llm.generate(prompt_token_ids=[prompt(20)], sampling=one)
    [expected] = llm.generate(
        prompt_token_ids=[prompt(20)], sampling=FREE.changed(generation_mode="autoregressive")
    )
    assert output.token_ids == expected.token_ids
    assert output.nfe == expected.nfe == 16


@pytest.mark.parametrize("rule", [{}, slow({"transfer": "threshold", "threshold": 0.3})])
def test_self_speculation_gives_the_autoregressive_tokens(llm: LLM, rule: dict[str, Any]):
    """Across pages, prompts in parts, in company, with blocks of several lengths; and their probabilities."""
    lengths = [(5, 8), (190, 16), (63, 3), (64, 33), (65, 1), (250, 64)]
    ids = [prompt(n, 4) for n, _ in lengths]
    one = SamplingParams(generation_mode="autoregressive", gen_length=70, early_stop=False, logprobs=2)
    asked = [one.changed(**SPECULATION, block_length=b, **rule) for _, b in lengths]
    outputs = llm.generate(prompt_token_ids=ids, sampling=asked)
    expected = llm.generate(prompt_token_ids=ids, sampling=one)
    for output, other in zip(outputs, expected, strict=True):
        assert output.token_ids == other.token_ids
        assert len(output.top_logprobs or ()) == 70
        for found, given in zip(output.top_logprobs or (), other.top_logprobs or (), strict=True):
            assert found == pytest.approx(given, abs=2e-5)


def test_verified_tokens_are_told_once(llm: LLM):
    """Evaluations that draft are steps of which nothing is told."""
    [run, *_] = SPECULATIVE
    updates = list(llm.stream(prompt_token_ids=[run.prompt], sampling=run.sampling))
    steps = [update for update in updates if isinstance(update, StepUpdate)]
    told = np.concatenate([step.positions for step in steps])
    np.testing.assert_array_equal(told, len(run.prompt) + np.arange(len(run.output)))
    assert np.concatenate([step.provisional for step in steps]).tolist() == run.output
    assert all(step.committed.all() for step in steps)
    assert [step.step for step in steps] == list(range(0, run.nfe, 2))


def test_evaluations_are_counted(llm: LLM):
    run, before = SPECULATIVE[2], llm.engine.stats().evaluated
    llm.generate(prompt_token_ids=[run.prompt], sampling=run.sampling)
    assert llm.engine.stats().evaluated - before == run.nfe


@pytest.mark.slow
def test_draws_do_not_depend_on_company(llm: LLM):
    sampling = [FREE.changed(temperature=1.0, seed=i, top_k=[None, 20][i % 2]) for i in range(4)]
    sampling += [one.changed(generation_mode="autoregressive") for one in sampling]
    ids = [prompt(20 * i + 5, i) for i in range(8)]
    together = llm.generate(prompt_token_ids=ids, sampling=sampling)
    for one, asked, output in zip(ids, sampling, together, strict=True):
        [alone] = llm.generate(prompt_token_ids=[one], sampling=asked)
        assert alone.token_ids == output.token_ids


@pytest.mark.slow
def test_nothing_compiles_after_a_warm_up():
    sizes = {"max_num_batched_tokens": 64, "kv_pool": "1MiB", "progress": False}
    with LLM(NEMOTRON.directory, warmup=True, **sizes) as llm:
        compiled = llm.executables.compiled
        sampling = [FREE, FREE.changed(transfer="threshold", temperature=1.0, top_k=5)]
        for mode in ("autoregressive", "self_speculation"):
            sampling += [FREE.changed(generation_mode=mode), FREE.changed(generation_mode=mode, logprobs=1)]
        llm.generate(prompt_token_ids=[prompt(40 * i + 3) for i in range(6)], sampling=sampling)
        assert llm.executables.compiled == compiled


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"small_block_length": 4}, "leave small_block_length out"),
        ({"editing_threshold": 0.5}, "leave editing_threshold out"),
        ({"prompt_masks": "official"}, "leave prompt_masks at 'error'"),
        ({"block_length": 65}, "block_length is 65, expected at most 64"),
        ({"gen_length": 20, "steps": 7}, "steps 7 is not divisible by the 3 blocks of 8"),
        ({"cache": "dual"}, "a block model stores finished blocks"),
        ({"generation_mode": "autoregressive", "block_length": 8}, "a causal model has no blocks"),
        ({**SPECULATION, "temperature": 1.0}, "leave temperature at 0.0"),
        ({**SPECULATION, "presence_penalty": 1.0}, "presence_penalty is for causal models"),
        ({**SPECULATION, "block_length": 65}, "block_length is 65, expected at most 64"),
        ({**SPECULATION, "transfer": "adaptive"}, "choose another transfer than 'adaptive'"),
        ({**SPECULATION, "steps": 4}, "steps is for models that denoise"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_mode_does_not_take_is_refused(llm: LLM, options: dict[str, Any], told: str):
    with pytest.raises(RequestError, match=told):
        llm.generate(prompt_token_ids=[[1, 2]], sampling=SamplingParams(**options))


@pytest.mark.parametrize("mode", ["diffusion", "bidirectional", "self_speculation"])
@pytest.mark.parametrize(
    ("ids", "told"), [([], "the prompt is empty"), ([1, MASK], f"the mask id {MASK} at position 1")]
)
def test_prompts_that_nothing_follows(llm: LLM, mode: GenerationMode, ids: list[int], told: str):
    with pytest.raises(RequestError, match=told):
        llm.generate(prompt_token_ids=[ids], sampling=FREE.changed(generation_mode=mode))


@pytest.mark.parametrize("check", [check_causal, check_denoising])
def test_models_of_one_way_have_no_choice(check: Callable[[SamplingParams], None]):
    with pytest.raises(RequestError, match=r"^generation_mode is for models that generate in several ways"):
        check(SamplingParams(generation_mode="autoregressive"))


def test_blocks_of_several_requests_are_filled_together(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    parts = list[PartDone]()
    monkeypatch.setattr(llm.engine, "observe", parts.append)
    llm.generate(prompt_token_ids=[np.arange(1, 9 + i) for i in range(4)], sampling=FREE)
    assert {len(part.ids) for part in parts if part.kind is Kind.REUSE} == {4}
