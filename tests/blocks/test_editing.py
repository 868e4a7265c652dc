"""Committed tokens are edited as the published samplers do it, token by token at every step."""

from typing import Any

import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.blocks.request import block_spec
from jdllm.serving.updates import StepUpdate
from tests.blocks import oracle
from tests.blocks.edited import check, joint_runs, llada21_runs
from tests.blocks.oracle import Logits
from tests.blocks.recorded import Run
from tests.blocks.test_engine import prompt, run
from tests.causal.running import Build
from tests.decoding.slow_rules import Rule
from tests.engines import engine_of
from tests.helpers import slow

RUNS = [*llada21_runs(), *joint_runs()]
FREE = SamplingParams(gen_length=20, block_length=8, early_stop=False, return_history=True)


def test_all_recorded_runs():
    names = [each.name.split("_")[0] for each in RUNS]
    assert {name: names.count(name) for name in names} == {"llada21": 3, "llada21x": 9, "joint": 9}


def test_all_together(llada2: LLM):
    outputs = llada2.generate(
        prompt_token_ids=[each.prompt for each in RUNS], sampling=[each.sampling for each in RUNS]
    )
    for output, each in zip(outputs, RUNS, strict=True):
        check(output, each)


@pytest.mark.parametrize("recorded", [each if i % 6 == 0 else slow(each) for i, each in enumerate(RUNS)])
def test_alone(llada2: LLM, recorded: Run):
    [output] = llada2.generate(prompt_token_ids=[recorded.prompt], sampling=recorded.sampling)
    check(output, recorded)


@pytest.mark.parametrize("recorded", [RUNS[0], *map(slow, RUNS[5::5])])
def test_the_device_takes_one_step_at_a_time_or_many(llada2: LLM, recorded: Run):
    """Whoever watches each step has the host between any two of them."""
    asked: dict[str, Any] = {
        "prompt_token_ids": [recorded.prompt],
        "sampling": recorded.sampling.changed(return_history=False),
    }
    seen = list[StepUpdate]()
    [whole], [cut] = llada2.generate(**asked), llada2.generate(**asked, on_step=seen.append)
    assert whole.token_ids == cut.token_ids
    assert whole.nfe == cut.nfe == len(seen) == len(recorded.states)
    np.testing.assert_array_equal(whole.committed_in, cut.committed_in)


@pytest.mark.parametrize("recorded", RUNS[::9])
def test_updates_say_what_may_still_change(llada2: LLM, recorded: Run):
    """Of the tokens before `settled` none changes; some that are committed behind it do."""
    seen, changes = list[StepUpdate](), 0
    asked: dict[str, Any] = {"prompt_token_ids": [recorded.prompt], "sampling": recorded.sampling}
    [output] = llada2.generate(**asked, on_step=seen.append)
    tokens = np.concatenate([recorded.prompt, np.full(recorded.sampling.gen_length + 32, 511)])
    final = len(recorded.prompt)
    for update in seen:
        took = update.positions[update.committed]
        assert (took >= final).all()
        changes += int(np.count_nonzero(tokens[took] != 511))
        tokens[took] = update.provisional[update.committed]
        assert update.settled is not None
        final = max(final, update.settled)
    assert changes > 0
    assert tokens[len(recorded.prompt) :][: len(output.token_ids)].tolist() == output.token_ids
    assert final >= len(recorded.prompt) + len(output.token_ids)


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (Rule.DYNAMIC, {"transfer": "dynamic", "threshold": 0.3}),
        (Rule.THRESHOLD, {"transfer": "threshold", "threshold": 0.2}),
        (Rule.QUOTA, {"transfer": "schedule", "steps": 6}),
    ],
    ids=lambda value: value.value if isinstance(value, Rule) else "",
)
def test_rules(build: Build, config: ModelConfig, logits_of: Logits, rule: Rule, options: dict[str, Any]):
    """Ragged requests with thresholds, bounds and small blocks of their own, and one that is not edited."""
    asked = [(0.0, 3, None), (0.3, 16, None), (0.15, 0, None), (0.1, 5, 4), (None, 16, None), (0.05, 1, None)]
    specs = []
    for i, (editing, post, small) in enumerate(asked):
        edits = {} if editing is None else {"editing_threshold": editing, "max_post_steps": post}
        small_blocks = {} if small is None else {"small_block_length": small}
        steps = {"steps": options["steps"] * 2 - 2} if small and "steps" in options else {}
        sampling = FREE.changed(**{**options, **steps, **edits, **small_blocks})
        specs.append(block_spec(prompt(17 * i + 3, i), sampling, config))
    for request, spec, (editing, post, small) in zip(run(build(), specs), specs, asked, strict=True):
        expected = oracle.generate(
            logits_of,
            spec.prompt,
            20,
            8,
            spec.mask_id,
            rule=rule,
            steps=2 if "steps" in options else None,
            threshold=options.get("threshold", 0.9),
            editing=editing,
            post=post,
            small=small,
        )
        np.testing.assert_array_equal(request.history, expected)
        assert (request.edits > 0) == (editing is not None)


def test_a_threshold_that_nothing_exceeds_edits_nothing(build: Build, config: ModelConfig):
    """The tokens are those without editing; a block takes one step more, which finds nothing."""
    free = FREE.changed(transfer="dynamic", threshold=0.3)
    specs = [block_spec(prompt(21), each, config) for each in (free, free.changed(editing_threshold=1.0))]
    plain, edited = run(build(), specs)
    np.testing.assert_array_equal(plain.tokens, edited.tokens)
    assert edited.steps == plain.steps + len(edited.blocks)
    assert edited.edits == 0


def test_tokens_are_counted_once(build: Build, config: ModelConfig):
    engine = build()
    [request] = run(engine, [block_spec(prompt(24), FREE.changed(editing_threshold=0.0), config)])
    assert request.edits > 0
    assert engine.stats().tokens == 24  # of three blocks, which `gen_length` does not fill


@pytest.mark.slow
def test_editing_compiles_nothing_after_a_warm_up(params: Params, config: ModelConfig):
    executables = Executables("cpu")
    engine = engine_of(params, config, executables, 64, pages=20)
    engine.warm()
    compiled = executables.compiled
    run(engine, [block_spec(prompt(9), FREE.changed(editing_threshold=0.2), config)])
    assert executables.compiled == compiled
    engine.close()


def test_shifted_logits(fast_dllm_v2: LLM):
    with pytest.raises(RequestError, match="editing_threshold is for models whose rows predict their own"):
        fast_dllm_v2.generate(prompt_token_ids=[[1]], sampling=SamplingParams(editing_threshold=0.5))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_post_steps": 4}, "max_post_steps has no effect here: it needs an editing_threshold"),
        ({"editing_threshold": 1.5}, "editing_threshold is 1.5, expected a number from 0 to 1 or None"),
        ({"editing_threshold": 0.5, "max_post_steps": -1}, "max_post_steps is -1, expected"),
        ({"editing_threshold": 0.5, "max_post_steps": 4096}, "max_post_steps is 4096, expected"),
        ({"penalty_lambda": 1.0}, "penalty_lambda is for blocks that are edited"),
        ({"editing_threshold": 0.5, "penalty_lambda": -1.0}, "penalty_lambda is -1.0, expected"),
        ({"editing_threshold": 0.5, "stop_in_block": True}, "a token may change until its block is finished"),
    ],
    ids=["alone", "share", "negative", "many", "unedited", "gain", "stop"],
)
def test_values(options: dict[str, Any], told: str):
    with pytest.raises(RequestError, match=told):
        SamplingParams(**options)


def test_the_bound_goes_with_the_threshold():
    asked = SamplingParams(editing_threshold=0.5, max_post_steps=4, penalty_lambda=1.0)
    assert asked.changed(editing_threshold=None) == SamplingParams()
