"""The public class: inputs, errors, outputs and step updates."""

import gc
import re
import shutil
import weakref
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.schedule import transfer_schedule
from jdllm.errors import CheckpointError, ConfigError, RequestError
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.updates import StepUpdate
from tests.conftest import LLADA, MAX_POSITIONS, STOPS
from tests.helpers import slow

MASK = 510
SHORT = SamplingParams(gen_length=8, steps=4)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({}, "either prompts or prompt_token_ids"),
            ({"prompts": ["a"], "prompt_token_ids": [[1]]}, "either prompts or prompt_token_ids"),
            ({"prompts": ["a"]}, "tokenizer.json"),
            ({"prompt_token_ids": [1, 2]}, "one list for each prompt"),
            ({"prompt_token_ids": [[1, 512]]}, "512 at position 1 is outside the vocabulary"),
            ({"prompt_token_ids": [[1, MASK]]}, "mask id 510 at position 1"),
            ({"sampling": SamplingParams(gen_length=8, block_length=3)}, "not divisible by block_length 3"),
            ({"sampling": SamplingParams(gen_length=8, block_length=4, steps=3)}, "number of blocks 2"),
            ({"sampling": [SHORT]}, "1 sampling parameters for 2 prompts"),
            ({"sampling": [SHORT] * 3}, "3 sampling parameters for 2 prompts"),
            ({"sampling": SamplingParams(confidence_eos_eot_inf="fixed")}, "eot_token_id"),
        ],
    )
    def test_generate(self, arguments: dict[str, Any], message: str, llm: LLM):
        if set(arguments) == {"sampling"}:
            arguments = {"prompt_token_ids": PROMPTS, **arguments}
        with pytest.raises(RequestError, match=message):
            llm.generate(**arguments)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({}, "either texts or token_ids"),
            ({"texts": ["a"], "token_ids": [[MASK]]}, "either texts or token_ids"),
            ({"texts": "a"}, "tokenizer.json"),
            ({"token_ids": [[1, 2]]}, "nothing to infill"),
            ({"token_ids": [[]]}, "empty"),
            ({"token_ids": [[1, MASK, -2]]}, "-2 at position 2"),
        ],
    )
    def test_infill(self, arguments: dict[str, Any], message: str, llm: LLM):
        with pytest.raises(RequestError, match=message):
            llm.infill(**arguments)

    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            ([[1, 2], [1]], r"shape \[batch, length\]"),
            ([1, 2], r"shape \[batch, length\]"),
            ([[]], r"shape \[batch, length\]"),
            ([], r"shape \[batch, length\]"),
            ([[1, 600]], "600 .*outside the vocabulary"),
            ([[-1, 6]], "-1 .*outside the vocabulary"),
        ],
    )
    def test_logits(self, ids: list, message: str, llm: LLM):
        with pytest.raises(RequestError, match=message):
            llm.logits(ids)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (([1], []), "answer is empty"),
            (([1], [600]), "600 .*outside the vocabulary"),
            (([-1], [6]), "-1 .*outside the vocabulary"),
            (("text", [6]), "tokenizer.json"),
        ],
    )
    def test_score(self, arguments: tuple, message: str, llm: LLM):
        with pytest.raises(RequestError, match=message):
            llm.score(*arguments)

    @pytest.mark.parametrize("option", [{"mc_num": 0}, {"batch_size": 0}, {"mc_num": True}, {"mc_num": "8"}])
    def test_counts_of_score(self, option: dict[str, Any], llm: LLM):
        with pytest.raises(RequestError, match=r"is .*, expected a positive integer"):
            llm.score([1], [2], **option)

    @pytest.mark.parametrize("option", [{"cfg_scale": -1.0}, {"cfg_scale": float("nan")}, {"seed": -1}])
    def test_sampling_options_of_score(self, option: dict[str, Any], llm: LLM):
        with pytest.raises(RequestError, match=rf"{next(iter(option))} is .*expected"):
            llm.score([1], [2], **option)

    def test_a_chat_without_a_tokenizer(self, llm: LLM):
        with pytest.raises(RequestError, match="chat template needs tokenizer files"):
            llm.chat_prompt("hello")

    def test_a_model_without_a_mask_id(self):
        model = LLM(LLADA.directory, hf_overrides={"mask_token_id": None})
        assert model.config.mask_id is None
        for call in (
            lambda: model.generate(prompt_token_ids=PROMPTS),
            lambda: model.infill(token_ids=PROMPTS),
            lambda: model.score([1], [2]),
        ):
            with pytest.raises(RequestError, match=r"no mask id .*mask_token_id"):
                call()

    @pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_logits"])
    def test_limits_below_one(self, name: str):
        limit: dict[str, Any] = {name: 0}
        with pytest.raises(ConfigError, match=f"{name} is 0, expected a positive integer"):
            LLM(LLADA.directory, **limit)

    @pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_logits"])
    @pytest.mark.parametrize("value", [1.5, "64", -3, True, np.bool_(True), np.int64(0)])
    def test_limits_that_are_no_counts(self, name: str, value: Any):
        limit: dict[str, Any] = {name: value}
        with pytest.raises(ConfigError, match=re.escape(f"{name} is {value!r}, expected a positive integer")):
            LLM(LLADA.directory, **limit)

    @pytest.mark.parametrize(
        "arguments",
        [
            {"model": 5},
            {"model": None},
            {"dtype": 32},
            {"chunks": 4},
            {"hf_overrides": "eos_token_id"},
            {"verifier": 7},
            {"verifier_shares_ids": "false"},
            {"progress": 1},
            {"memory": True},
            {"host_memory": False},
        ],
    )
    def test_arguments_of_the_class_of_a_wrong_type(self, arguments: dict[str, Any]):
        (name, value), *_ = arguments.items()
        with pytest.raises(ConfigError, match=re.escape(f"{name} is {value!r}, expected ")):
            LLM(**{"model": LLADA.directory, **arguments})

    @pytest.mark.parametrize(
        "option",
        [
            {"dtype": "float32"},
            {"hf_overrides": {"eos_token_id": 7}},
            {"adapter": "lora"},
            {"load_weights": False},
        ],
    )
    def test_checkpoint_options_for_a_model_in_memory(
        self, option: dict[str, Any], config: ModelConfig, params: Params
    ):
        with pytest.raises(
            ConfigError, match="dtype, hf_overrides, adapter and load_weights are for checkpoints"
        ):
            LLM(Transformer(config, params), **option)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"prompts": 5}, "prompts is 5, expected one entry for each prompt"),
            ({"prompt_token_ids": 5}, "prompt_token_ids is 5, expected one entry"),
            ({"prompt_token_ids": PROMPTS, "sampling": {"gen_length": 8}}, "must be SamplingParams"),
            ({"prompt_token_ids": PROMPTS, "sampling": [SHORT, 7]}, "must be SamplingParams"),
            ({"prompt_token_ids": PROMPTS, "on_step": 7}, "on_step is 7, expected a function"),
        ],
    )
    def test_arguments_of_a_wrong_type(self, arguments: dict[str, Any], message: str, llm: LLM):
        with pytest.raises(RequestError, match=message):
            llm.generate(**arguments)

    def test_a_directory_that_is_not_there(self):
        with pytest.raises(CheckpointError, match="no directory"):
            LLM("./nowhere")


class TestOutputs:
    def test_fields(self, llm: LLM):
        outputs = llm.generate(prompt_token_ids=PROMPTS, sampling=SHORT)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert output.prompt is None
            assert output.text is None
            assert output.prompt_token_ids == prompt
            assert len(output.token_ids) == 8
            assert MASK not in output.token_ids
            assert output.finish_reason == "length"
            assert output.nfe == 4
            assert output.history is None
            assert output.timings.total >= output.timings.running > 0

    def test_arrays_and_lists_are_the_same_ids(self, llm: LLM):
        prompts = np.array([[1, 2, 3], [7, 8, 9]])
        a, b = (llm.generate(prompt_token_ids=p, sampling=SHORT) for p in (list(prompts), prompts.tolist()))
        assert [x.token_ids for x in a] == [x.token_ids for x in b]

    def test_nothing_to_generate(self, llm: LLM):
        assert llm.generate(prompt_token_ids=[]) == []
        assert llm.generate(prompts=[]) == []

    def test_an_end_is_kept_and_reported(self, stopping_llm: LLM):
        rng = np.random.default_rng(1)
        prompts = [rng.integers(0, 500, 7) for _ in range(12)]
        outputs = stopping_llm.generate(prompt_token_ids=prompts, sampling=SamplingParams(gen_length=8))
        ended = [output for output in outputs if output.finish_reason == "stop"]
        assert ended
        for output in outputs:
            assert not set(output.token_ids[:-1]) & set(STOPS.values())
            assert (output.token_ids[-1] in STOPS.values()) == (output in ended)

    @pytest.mark.parametrize("fixture", ["llm", "stopping_llm"])
    @pytest.mark.parametrize("name", ["fwd_b1", "fwd_batch", "fwd_nomask"])
    def test_logits(
        self, name: str, fixture: str, request: pytest.FixtureRequest, goldens: dict[str, np.ndarray]
    ):
        logits = request.getfixturevalue(fixture).logits(goldens[f"{name}.input_ids"])
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, goldens[f"{name}.logits"], atol=2e-4, rtol=1e-4)


def test_a_model_describes_itself(llm: LLM, params: Params):
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    size = f"{4 * count / 2**30:.2f} GiB of weights"
    assert repr(llm) == f"LLM(llada, {count / 1e9:.3g}B parameters, float32, cpu, {size})"
    bounded = LLM(LLADA.directory, dtype="bfloat16", memory="3GiB")
    assert re.search(r"bfloat16, cpu, .* of weights in 3\.00 GiB\)", repr(bounded))


class TestUndefinedIds:
    """A tokenizer of 400 ids beside an embedding of 512, and tokens drawn almost evenly."""

    @pytest.fixture(scope="class")
    @classmethod
    def short(cls, tmp_path_factory: pytest.TempPathFactory) -> LLM:
        directory = tmp_path_factory.mktemp("short")
        for name in ("config.json", "model.safetensors"):
            shutil.copy(LLADA.directory / name, directory)
        words = models.WordLevel({f"w{i}": i for i in range(400)}, unk_token="w0")
        Tokenizer(words).save(str(directory / "tokenizer.json"))
        return LLM(directory, dtype="float32", max_num_batched_tokens=64)

    def seen(self, llm: LLM, **options) -> set[int]:
        """Every id that some position held provisionally."""
        sampling = [
            SamplingParams(gen_length=16, temperature=1000.0, seed=seed, early_stop=False, **options)
            for seed in range(12)
        ]
        ids: set[int] = set()
        llm.generate(
            prompt_token_ids=[[1, 2, 3]] * 12,
            sampling=sampling,
            on_step=lambda update: ids.update(update.provisional.tolist()),
        )
        return ids

    def test_the_length_of_the_tokenizer_is_known(self, short: LLM):
        assert (short.config.token_limit, short.config.vocab_size) == (400, 512)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "options",
        [
            {"transfer": "factor"},
            slow({"undefined_tokens": "banned"}),
            slow({"transfer": "threshold"}),
        ],
    )
    def test_are_kept_out(self, options: dict[str, Any], short: LLM):
        seen = self.seen(short, **options)
        assert len(seen) > 50
        assert max(seen) < 400

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "options",
        [
            {"undefined_tokens": "official", "transfer": "factor"},
            slow({}),
        ],
    )
    def test_may_be_chosen_as_published(self, options: dict[str, Any], short: LLM):
        assert max(self.seen(short, **options)) >= 400

    @pytest.mark.slow
    def test_the_mask_is_one_of_them_where_all_ids_are_defined(self, llm: LLM):
        assert MASK in self.seen(llm)
        banned = self.seen(llm, undefined_tokens="banned")
        assert MASK not in banned
        assert max(banned) > 400


class TestLength:
    def test_beyond_the_positions_of_the_model_warns(self, stopping_llm: LLM):
        longest = MAX_POSITIONS - 8
        with pytest.warns(UserWarning, match="sequence of 81 tokens .* 80 positions") as caught:
            stopping_llm.generate(prompt_token_ids=[[1], list(range(longest + 1))], sampling=SHORT)
        assert caught[0].filename == __file__
        with pytest.warns(UserWarning, match="sequence of 90 tokens"):
            stopping_llm.infill(token_ids=[[MASK, *range(89)]])

    def test_up_to_them_does_not(self, stopping_llm: LLM):
        longest = MAX_POSITIONS - 8
        stopping_llm.generate(prompt_token_ids=[[1], list(range(longest))], sampling=SHORT)


class TestStepUpdates:
    sampling = SamplingParams(gen_length=8, block_length=4, steps=6, return_history=True, early_stop=False)

    @pytest.fixture(scope="class")
    @classmethod
    def updates(cls, llm: LLM) -> tuple[list[StepUpdate], list[np.ndarray]]:
        """All updates of a batch of two, and the history of each request."""
        updates: list[StepUpdate] = []
        outputs = llm.generate(prompt_token_ids=PROMPTS, sampling=cls.sampling, on_step=updates.append)
        return updates, [np.asarray(output.history) for output in outputs]

    def test_one_for_each_request_and_step_as_they_happen(self, updates):
        assert [(u.step, u.request) for u in updates[0]] == [(s, r) for s in range(6) for r in (0, 1)]

    def test_committed_tokens_rebuild_the_history(self, updates):
        for index, prompt in enumerate(PROMPTS):
            state = np.array(prompt + [MASK] * 8)
            for update, after in zip(
                (u for u in updates[0] if u.request == index), updates[1][index], strict=True
            ):
                state[update.positions[update.committed]] = update.provisional[update.committed]
                np.testing.assert_array_equal(state, after)

    def test_evaluated_positions_are_the_masks_up_to_the_end_of_the_block(self, updates):
        for index, prompt in enumerate(PROMPTS):
            before = np.array(prompt + [MASK] * 8)
            for update in (u for u in updates[0] if u.request == index):
                stop = len(prompt) + (4 if update.step < 3 else 8)
                np.testing.assert_array_equal(update.positions, np.flatnonzero(before[:stop] == MASK))
                assert not (update.provisional == MASK).any()
                before = updates[1][index][update.step]

    def test_every_step_commits_its_quota(self, updates):
        quotas = [*transfer_schedule(4, 3), *transfer_schedule(4, 3)]
        for update in updates[0]:
            assert update.committed.sum() == quotas[update.step]

    def test_provisional_tokens_may_change_until_they_are_committed(self, updates):
        first = next(u for u in updates[0] if u.request == 0)
        assert not first.committed.all()

    def test_they_compare_and_refuse_to_be_hashed(self, updates):
        first, second = updates[0][:2]
        assert first == first._replace(positions=first.positions.copy())
        assert first != second
        assert first != tuple(second)
        with pytest.raises(TypeError, match="unhashable"):
            hash(first)

    def test_infill_reports_too(self, llm: LLM):
        seen: list[StepUpdate] = []
        llm.infill(token_ids=[[1, MASK, 2, MASK]], on_step=seen.append)
        assert seen[0].positions.tolist() == [1, 3]
        assert sum(int(u.committed.sum()) for u in seen) == 2


def test_a_closed_model_frees_its_memory_at_once():
    """Whoever loads one model after another has room for one, and no garbage collection may be needed."""
    llm = LLM(LLADA.directory, progress=False, cache_dir=None, kv_pool="16MiB")
    llm.generate(prompt_token_ids=PROMPTS, sampling=SHORT)
    engine = weakref.ref(llm.engine)
    gc.disable()
    try:
        llm.close()
        assert engine() is None
    finally:
        gc.enable()
