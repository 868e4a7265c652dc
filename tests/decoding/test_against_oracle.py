"""The sampler against a slow re-implementation in float64, at every step of every request."""

from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.outputs import RequestOutput
from jdllm.planning.buckets import MAX_STEPS_PER_DISPATCH
from tests.conftest import BUDGET, STOPS
from tests.decoding import oracle
from tests.helpers import slow

IDS = oracle.Ids(mask=510, eos=STOPS["eos_token_id"], eot=STOPS["eot_token_id"])


def sampled(**options) -> SamplingParams:
    return SamplingParams(**{"gen_length": 8, "early_stop": False, "return_history": True, **options})


def prompts(count: int, seed: int = 0) -> list[np.ndarray]:
    """Ids of various lengths; with 8 ids generated after each, a batch has at most 32 head rows."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 500, rng.integers(8, 20)) for _ in range(count)]


def logits_of(model: LLM) -> Callable[[np.ndarray], np.ndarray]:
    return lambda ids: model.logits(ids[None])[0]


def check(outputs: list[RequestOutput], expected: list[list[np.ndarray]]) -> None:
    assert len(outputs) == len(expected)
    for output, states in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(output.history, states)
        assert output.nfe == len(states)


RAGGED = {
    "plain": sampled(),
    "blocks": sampled(steps=4, block_length=4),
    "one step": sampled(steps=1),
    "more steps than masks": sampled(gen_length=4, steps=9),
    "uneven": sampled(steps=6, block_length=4),
    "guided": sampled(steps=4, block_length=4, cfg_scale=0.7),
    "temperature": sampled(temperature=1.0, seed=3),
    "low temperature, guided": sampled(temperature=0.4, seed=2**63 + 11, cfg_scale=1.5, block_length=4),
    "random order": sampled(remasking="random", seed=8, block_length=4),
    "random order and tokens": sampled(remasking="random", temperature=2.0, seed=9, steps=4),
    "no end": sampled(logits_eos_inf=True, block_length=4),
    "no end, hot": sampled(logits_eos_inf=True, temperature=1.5, seed=4),
    "ends last": sampled(confidence_eos_eot_inf="fixed"),
    "ends last, hot": sampled(confidence_eos_eot_inf="fixed", temperature=1.0, seed=5),
    "ends last, random order": sampled(confidence_eos_eot_inf="fixed", remasking="random", seed=6),
    "official ends": sampled(confidence_eos_eot_inf="official"),
    "official ends, hot": sampled(confidence_eos_eot_inf="official", temperature=1.0, seed=7),
}


def test_ragged_batch_of_different_parameters(stopping_llm: LLM):
    ids, sampling = prompts(len(RAGGED)), list(RAGGED.values())
    outputs = stopping_llm.generate(prompt_token_ids=ids, sampling=sampling)
    logits = logits_of(stopping_llm)
    check(outputs, [oracle.generate(logits, x, s, IDS) for x, s in zip(ids, sampling, strict=True)])


@pytest.mark.slow
def test_an_empty_prompt_asks_for_any_text(stopping_llm: LLM):
    names = ("plain", "blocks", "guided", "temperature")
    ids, sampling = [np.empty(0, np.int64), *prompts(1)], [RAGGED[name] for name in names]
    logits = logits_of(stopping_llm)
    for one in sampling:
        outputs = stopping_llm.generate(prompt_token_ids=ids, sampling=one)
        check(outputs, [oracle.generate(logits, x, one, IDS) for x in ids])


# Thresholds and bounds at which the tiny model commits now one token and now several.
RULES = {
    "threshold": sampled(transfer="threshold", threshold=0.3),
    "threshold, strict, in blocks": sampled(
        transfer="threshold", threshold=0.25, threshold_strict=True, block_length=4
    ),
    "threshold, guided": sampled(transfer="threshold", threshold=0.5, cfg_scale=1.0),
    "threshold, hot": sampled(transfer="threshold", threshold=0.1, temperature=1.0, seed=1),
    "threshold, random order": sampled(transfer="threshold", threshold=0.6, remasking="random", seed=2),
    "falling threshold": sampled(transfer="falling_threshold", threshold=0.4, threshold_fall=0.6),
    "falling threshold, hot, in blocks": sampled(
        transfer="falling_threshold",
        threshold=0.3,
        threshold_fall=0.9,
        threshold_strict=True,
        temperature=0.5,
        seed=6,
        block_length=4,
    ),
    "factor": sampled(transfer="factor", factor=2.0),
    "factor, in blocks": sampled(transfer="factor", factor=1.5, block_length=4),
    "factor, fixed end": sampled(transfer="factor", factor=1.5, block_length=4, factor_end="fixed"),
    "factor, hot": sampled(transfer="factor", factor=2.2, temperature=0.7, seed=3),
    "entropy bound": sampled(transfer="entropy_bound", entropy_bound=2.5),
    "entropy bound, in blocks": sampled(transfer="entropy_bound", entropy_bound=4.0, block_length=4),
    "entropy bound, hot": sampled(transfer="entropy_bound", entropy_bound=4.0, temperature=1.0, seed=4),
    "margin": sampled(transfer="margin", steps=4),
    "margin, hot, in blocks": sampled(
        transfer="margin", steps=4, block_length=4, temperature=1.0, seed=5, undefined_tokens="official"
    ),
    "dynamic": sampled(transfer="dynamic", threshold=0.3, steps=4),
    "dynamic, hot, in blocks": sampled(
        transfer="dynamic", threshold=0.2, block_length=4, temperature=0.7, seed=7
    ),
    "dynamic, random order": sampled(transfer="dynamic", threshold=0.6, steps=4, remasking="random", seed=3),
    "sequential": sampled(transfer="sequential", steps=4),
    "sequential, in blocks, rounded": sampled(
        transfer="sequential", steps=6, block_length=4, confidence_dtype="model"
    ),
    "ends last, sequential": sampled(confidence_eos_eot_inf="fixed", transfer="sequential", steps=4),
    "ends last, threshold": sampled(confidence_eos_eot_inf="fixed", transfer="threshold", threshold=0.2),
    "ends last, entropy bound": sampled(
        confidence_eos_eot_inf="fixed", transfer="entropy_bound", entropy_bound=4.0
    ),
    "official ends, margin": sampled(confidence_eos_eot_inf="official", transfer="margin", steps=4),
    "schedule, nucleus": sampled(top_p=0.7, temperature=1.5, seed=8),
    "threshold, few": sampled(
        transfer="threshold", threshold=0.2, top_k=3, min_p=0.05, temperature=2.0, seed=9, block_length=4
    ),
    "schedule, banned": sampled(undefined_tokens="banned", temperature=3.0, seed=6),
}
UNUSED = dict.fromkeys(("maskgit_plus", "topk_margin", "entropy"), ("threshold",)) | {
    "origin": ("threshold", "alg_temp"),
    "confidence_threshold": ("eps",),
}
DREAM_RULES = {
    f"{alg}, {label}": sampled(
        alg=alg, seed=seed, **{k: v for k, v in options.items() if k not in UNUSED[alg]}
    )
    for alg in ("origin", "maskgit_plus", "topk_margin", "entropy", "confidence_threshold")
    for seed, (label, options) in enumerate(
        {
            "cold": {"steps": 4},
            "one a step": {"threshold": 0.4},
            "hot": {"steps": 4, "temperature": 0.8, "threshold": 0.2},
            "nucleus": {"steps": 4, "top_p": 0.6, "threshold": 0.4},
            "top k": {"steps": 4, "top_k": 3, "threshold": 0.5},
            "filtered and hot": {"steps": 4, "top_p": 0.8, "top_k": 20, "temperature": 1.3, "threshold": 0.3},
            "min p": {"steps": 4, "min_p": 0.3, "threshold": 0.4},
            "drawn order": {"steps": 4, "alg_temp": 0.2, "threshold": 0.4},
            "eps": {"steps": 8, "eps": 0.2, "threshold": 0.4},
            "guided": {"steps": 4, "cfg_scale": 0.8, "threshold": 0.4},
        }.items()
    )
}


@pytest.mark.slow
@pytest.mark.parametrize("rules", [pytest.param(RULES, id="transfer"), slow(DREAM_RULES, id="alg")])
def test_every_rule_in_one_ragged_batch(rules: dict[str, SamplingParams], stopping_llm: LLM):
    ids, sampling = prompts(len(rules), seed=5), list(rules.values())
    outputs = stopping_llm.generate(prompt_token_ids=ids, sampling=sampling)
    logits = logits_of(stopping_llm)
    check(outputs, [oracle.generate(logits, x, s, IDS) for x, s in zip(ids, sampling, strict=True)])


@pytest.mark.parametrize("rules", [RULES, DREAM_RULES], ids=["transfer", "alg"])
@pytest.mark.slow
def test_every_rule_with_shifted_logits(rules: dict[str, SamplingParams], dream_llm: LLM):
    sampling = [s for s in rules.values() if s.confidence_eos_eot_inf is None]
    ids = prompts(len(sampling), seed=6)
    outputs = dream_llm.generate(prompt_token_ids=ids, sampling=sampling)
    logits, known = logits_of(dream_llm), oracle.Ids(mask=509, shift=True)
    check(outputs, [oracle.generate(logits, x, s, known) for x, s in zip(ids, sampling, strict=True)])


@pytest.mark.slow
def test_rules_commit_now_one_token_and_now_several(stopping_llm: LLM):
    """What makes the comparison with the oracle worth something."""
    for name in ("threshold", "falling threshold", "factor", "entropy bound", "threshold, hot"):
        outputs = stopping_llm.generate(prompt_token_ids=prompts(8, seed=5), sampling=RULES[name])
        took = [int((a != b).sum()) for o in outputs for a, b in pairwise(np.asarray(o.history))]
        assert {1, 2} <= set(took), name


@pytest.mark.parametrize("name", ["off_g32_s20_b16_uneven", "off_g16_s16_b8_cfg", "off_conf_eos_eot_inf"])
def test_the_oracle_reproduces_the_recordings(name: str, trajectories, cases, stopping_llm: LLM):
    case = cases[name]
    fields = ("gen_length", "steps", "block_length", "cfg_scale")
    ends = "official" if case.get("confidence_eos_eot_inf") else None
    sampling = sampled(**{f: case[f] for f in fields}, confidence_eos_eot_inf=ends)
    states = oracle.generate(logits_of(stopping_llm), trajectories[f"{name}.prompt"][0], sampling, IDS)
    np.testing.assert_array_equal(states, trajectories[f"{name}.states"][:, 0])


@pytest.mark.slow
def test_a_block_longer_than_a_dispatch(llm: LLM):
    length = MAX_STEPS_PER_DISPATCH + 6
    sampling = sampled(gen_length=length, remasking="random", seed=1)
    outputs = llm.generate(prompt_token_ids=[[1, 2, 3]], sampling=sampling)
    assert outputs[0].nfe == length
    check(outputs, [oracle.generate(logits_of(llm), np.array([1, 2, 3]), sampling, IDS)])


class TestEndsInTheConfidence:
    """`confidence_eos_eot_inf`, on enough prompts that each rule for the softmax decides somewhere."""

    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["fixed", "official"])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_softmax(self, mode: Literal["fixed", "official"], temperature: float, stopping_llm: LLM):
        ids = prompts(16, seed=4)
        sampling = sampled(confidence_eos_eot_inf=mode, steps=4, temperature=temperature)
        outputs = stopping_llm.generate(prompt_token_ids=ids, sampling=sampling)
        logits = logits_of(stopping_llm)
        check(outputs, [oracle.generate(logits, x, sampling, IDS) for x in ids])

    def test_positions_that_hold_an_end_commit_after_all_others(self, stopping_llm: LLM):
        ids = prompts(6, seed=2)
        seen = 0
        updates = []
        fixed = sampled(confidence_eos_eot_inf="fixed", steps=4)
        stopping_llm.generate(prompt_token_ids=ids, sampling=fixed, on_step=updates.append)
        for update in updates:
            ends = np.isin(update.provisional, list(STOPS.values()))
            if (ends & update.committed).any():
                assert update.committed[~ends].all()
            seen += (ends & ~update.committed).any()
        assert seen


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"temperature": 1.0, "seed": 1}, marks=pytest.mark.slow),
        pytest.param({"cfg_scale": 1.0}, marks=pytest.mark.slow),
    ],
)
def test_early_stop_keeps_the_text_of_the_full_run(stopping_llm: LLM, options: dict):
    ids = prompts(10, seed=1)
    full = stopping_llm.generate(
        prompt_token_ids=ids, sampling=sampled(gen_length=12, block_length=3, **options)
    )
    early = SamplingParams(gen_length=12, block_length=3, **options)
    short = stopping_llm.generate(prompt_token_ids=ids, sampling=early)
    for whole, cut in zip(full, short, strict=True):
        ends = [at for at, token in enumerate(whole.token_ids) if token in STOPS.values()]
        kept = ends[0] + 1 if ends else len(whole.token_ids)
        assert cut.token_ids == whole.token_ids[:kept]
        assert cut.nfe == (kept + 2) // 3 * 3
        assert cut.finish_reason == ("stop" if ends else "length")
        assert whole.finish_reason == "length"
    assert any(cut.nfe < whole.nfe for whole, cut in zip(full, short, strict=True))


INFILLS = {
    "one block": sampled(),
    "blocks of masks": sampled(block_length=4),
    "few steps": sampled(block_length=4, steps=6),
    "one step a block": sampled(block_length=5, steps=3),
    "guided": sampled(block_length=4, cfg_scale=1.0),
    "drawn": sampled(block_length=4, temperature=1.0, remasking="random", seed=5),
}


@pytest.mark.slow
def test_infill_denoises_the_masks_in_groups(stopping_llm: LLM):
    rng = np.random.default_rng(3)
    sequences = []
    for _ in INFILLS:
        sequence = rng.integers(0, 500, 26)
        sequence[rng.choice(26, 12, replace=False)] = IDS.mask
        sequences.append(sequence)
    sampling = list(INFILLS.values())
    outputs = stopping_llm.infill(token_ids=sequences, sampling=sampling)
    logits = logits_of(stopping_llm)
    expected = [oracle.infill(logits, x, s, IDS) for x, s in zip(sequences, sampling, strict=True)]
    check(outputs, expected)
    for output, sequence, states in zip(outputs, sequences, expected, strict=True):
        given = sequence != IDS.mask
        assert output.prompt_token_ids == sequence.tolist()
        np.testing.assert_array_equal(output.token_ids, states[-1])
        np.testing.assert_array_equal(np.asarray(output.token_ids)[given], sequence[given])


@pytest.fixture(scope="module")
def coarse_llm(config: ModelConfig, params: Params) -> LLM:
    """bfloat16, with a head so sharp that most confidences round to 1."""
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params | {"head": params["head"] * 6})
    return LLM(Transformer(config, weights), max_num_batched_tokens=BUDGET)


@pytest.mark.slow
def test_confidences_rounded_to_the_dtype_of_the_model_tie(coarse_llm: LLM):
    ids = prompts(9, seed=0)
    coarse = sampled(confidence_dtype="model", steps=4)
    outputs = coarse_llm.generate(prompt_token_ids=ids, sampling=coarse)
    logits = logits_of(coarse_llm)
    check(outputs, [oracle.generate(logits, x, coarse, oracle.Ids(mask=510)) for x in ids])
    fine = coarse_llm.generate(prompt_token_ids=ids, sampling=sampled(steps=4))
    assert any((a.history != b.history).any() for a, b in zip(outputs, fine, strict=True))


@pytest.mark.slow
def test_f32_models_round_nothing(llm: LLM):
    ids = prompts(3)
    runs = [
        llm.generate(prompt_token_ids=ids, sampling=sampled(confidence_dtype=d)) for d in ("model", "float32")
    ]
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a.history, b.history)
