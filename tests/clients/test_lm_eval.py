"""lm-eval: our model class, alone and behind its command line, and its own client of servers."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
    get_rolling_token_windows,
    make_disjoint_window,
)

from jdllm.decoding.sampling import SamplingParams
from jdllm.demo import checkpoint_path, tasks
from jdllm.demo import tokenizer as demo
from jdllm.demo.tokenizer import plain_ids
from jdllm.errors import ConfigError, RequestError
from jdllm.harness.model import HarnessLM
from jdllm.harness.translation import rolling_windows
from jdllm.llm import LLM
from tests.causal_texts import BOS, EOS, Begins, words, write_speaking
from tests.clients.servers import MODEL, Server

pytestmark = pytest.mark.clients

GREEDY = {"until": [], "max_gen_toks": 32, "do_sample": False}
LIMIT = 12
STEPS = 2
GENERATED = "addition", "retrieval"
ROWS = 512


def load(**arguments: Any) -> HarnessLM:
    return HarnessLM(str(checkpoint_path()), dtype="float32", max_num_batched_tokens=ROWS, **arguments)


@pytest.fixture(scope="module")
def model() -> HarnessLM:
    return load(mc_num=32)


@pytest.fixture(scope="module")
def llm(model: HarnessLM) -> LLM:
    return model.llm


def instances(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


def logits(llm: LLM, ids: Sequence[int]) -> np.ndarray:
    return llm.logits([list(ids)])[0].astype(np.float64)


def greedy_answer(llm: LLM, prompt: list[int], count: int) -> list[int]:
    """In turn the surest token of all that are missing."""
    ids = [*prompt, *[demo.MASK] * count]
    while demo.MASK in ids:
        rows = logits(llm, ids)
        chances = np.exp(rows - rows.max(axis=1, keepdims=True))
        surest = np.where(np.array(ids) == demo.MASK, 1 / chances.sum(axis=1), -1).argmax()
        ids[surest] = int(rows[surest].argmax())
    return ids[len(prompt) :]


class TestModelClass:
    def test_generation_until_a_text_or_a_length(self, model: HarnessLM):
        sums = tasks.test_instances("addition", 3, seed=4)
        asked = [
            *((one.prompt, GREEDY) for one in sums),
            (sums[0].prompt, {**GREEDY, "until": [sums[0].answer[-1]]}),
            (sums[0].prompt, {**GREEDY, "max_gen_toks": 2, "block_length": 16, "gen_length": 32}),
        ]
        whole = sums[0].answer
        cut = whole[: whole.index(whole[-1])]
        found = model.generate_until(instances("generate_until", *asked), disable_tqdm=True)
        assert found == [*(one.answer for one in sums), cut, whole[:2]]

    def test_repetitions_are_the_samples_of_one_prompt(self, model: HarnessLM, llm: LLM):
        drawn = {"do_sample": True, "temperature": 20.0, "max_gen_toks": 8, "undefined_tokens": "banned"}
        found = model.generate_until(instances("generate_until", *[("sort cab=", drawn)] * 3))
        sampling = SamplingParams(temperature=20.0, max_tokens=8, undefined_tokens="banned", n=3)
        (expected,) = llm.generate("sort cab=", sampling)
        assert found == [sample.text for sample in expected.outputs]
        assert len(set(found)) == 3

    def test_likelihoods_are_those_of_ids_and_know_the_greedy_answer(self, model: HarnessLM, llm: LLM):
        best = bytes(greedy_answer(llm, plain_ids("123+456="), 3)).decode()
        asked = [("123+456=", best), ("123+456=", "12"), ("123+", "456="), ("", "1+1=2"), ("ab ", "c d")]
        found = model.loglikelihood(instances("loglikelihood", *asked), disable_tqdm=True)
        assert {greedy for _, greedy in found} == {True, False}
        moved = [*asked[:-1], ("ab", " c d")]
        for (context, answer), (score, greedy) in zip(moved, found, strict=True):
            expected = llm.score(plain_ids(context), plain_ids(answer), mc_num=32)
            assert score == pytest.approx(expected, rel=1e-4)
            assert greedy == (greedy_answer(llm, plain_ids(context), len(answer)) == plain_ids(answer))

    def test_settings_of_likelihoods(self, llm: LLM):
        model = load(mc_num=8, mc_batch_size=4, cfg_scale=1.0, seed=3, is_check_greedy=False, max_length=6)
        with pytest.warns(UserWarning, match="1 of 1 contexts are too long for max_length 6"):
            [(score, greedy)] = model.loglikelihood(instances("loglikelihood", ("123+456=", "579")))
        expected = llm.score(
            plain_ids("56="), plain_ids("579"), mc_num=8, batch_size=4, cfg_scale=1.0, seed=3
        )
        assert score == pytest.approx(expected, rel=1e-4)
        assert greedy is False
        [score] = model.loglikelihood_rolling(instances("loglikelihood_rolling", ("0123456789",)))
        parts = [("", "012345"), ("45", "6789")]
        options = {"mc_num": 8, "batch_size": 4, "cfg_scale": 1.0, "seed": 3}
        pairs = [(plain_ids(before), plain_ids(text)) for before, text in parts]
        assert score == pytest.approx(sum(llm.score(*pair, **options) for pair in pairs), rel=1e-4)

    def test_conversations_are_rendered_with_real_special_tokens(self, model: HarnessLM, llm: LLM):
        rendered = model.apply_chat_template([{"role": "user", "content": "1+1="}])
        assert llm.tokenizer is not None
        assert llm.tokenizer.encode(rendered, parse_special=True) == demo.chat_ids("1+1=")
        begun = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "It is "}]
        assert model.apply_chat_template(begun, add_generation_prompt=False) == rendered + "It is "
        (answer,) = model.generate_until(instances("generate_until", (rendered, GREEDY)))
        assert answer == llm.chat("1+1=")[0].text
        assert model.chat_template(True) == demo.CHAT_TEMPLATE
        assert "/" not in model.tokenizer_name

    def test_refused(self, tmp_path: Path):
        with pytest.raises(ConfigError, match="model_args has 'mc'"):
            load(mc=8)
        with pytest.raises(RequestError, match="threshold has no effect"):
            load(threshold=0.5)
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).symlink_to(checkpoint_path() / name)
        with pytest.raises(ConfigError, match="has no tokenizer files"):
            HarnessLM(pretrained=str(tmp_path))


@pytest.mark.parametrize("begins", ["added", "none"])
def test_a_causal_model_is_asked_as_lm_eval_asks_its_own(begins: Begins, tmp_path: Path):
    directory = write_speaking(tmp_path, "mistral_swa", begins)
    model = HarnessLM(str(directory), dtype="float32", max_num_batched_tokens=ROWS, max_length=6)
    llm, first, before = model.llm, EOS if begins == "none" else BOS, [BOS] * (begins == "added")
    asked = [("w5 w6", " w7 w8"), ("w4 w5 w6 w7 w8", " w9 w10 w11"), ("", "w9")]
    with pytest.warns(UserWarning, match="1 of 3 contexts are too long for max_length 6"):
        found = model.loglikelihood(instances("loglikelihood", *asked), disable_tqdm=True)
    pairs = [([*before, 5, 6], [7, 8]), ([5, 6, 7, 8], [9, 10, 11]), ([first], [9])]
    for (prompt, answer), (score, greedy) in zip(pairs, found, strict=True):
        best = logits(llm, [*prompt, *answer])[len(prompt) - 1 : -1].argmax(axis=1)
        assert score == pytest.approx(llm.score(prompt, answer), rel=1e-5)
        assert greedy == (best.tolist() == answer)
    [score] = model.loglikelihood_rolling(instances("loglikelihood_rolling", (words(*range(20, 36)),)))
    theirs = map(make_disjoint_window, get_rolling_token_windows(list(range(20, 36)), first, 6, 1))
    assert score == pytest.approx(sum(llm.score(*pair) for pair in theirs), rel=1e-5)
    with pytest.raises(ConfigError, match="model_args has 'mc_num'"):
        HarnessLM(str(directory), mc_num=8)
    with pytest.raises(RequestError, match="cfg_scale is for models that denoise"):
        HarnessLM(str(directory), cfg_scale=1.0)


@pytest.mark.parametrize("length", [1, 2, 5, 16])
@pytest.mark.parametrize("count", [0, 1, 5, 6, 15, 32])
def test_rolling_windows_are_lm_evals(count: int, length: int):
    ids = list(range(count))
    theirs = map(make_disjoint_window, get_rolling_token_windows(ids, -1, length, 1))
    assert rolling_windows(ids, -1, length) == list(theirs)


@pytest.fixture(scope="module")
def environment(pytestconfig: pytest.Config) -> dict[str, str]:
    """Of commands, which take what earlier ones have compiled."""
    assert pytestconfig.cache is not None
    caches = str(pytestconfig.cache.mkdir("clients"))
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": caches}


def jdllm(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jdllm", "eval", *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )


def harness(environment: dict[str, str], written: Path, *arguments: str) -> dict[str, dict[str, float]]:
    """The metrics of each task, from the first instances."""
    done = jdllm(environment, "--harness", *arguments, "--limit", str(LIMIT), "--output_path", str(written))
    assert done.returncode == 0, done.stderr
    (results,) = written.rglob("results_*.json")
    return json.loads(results.read_text())["results"]


@pytest.fixture(scope="module")
def own_shares(environment: dict[str, str]) -> dict[str, float]:
    """The share of right answers to the same instances by `jdllm eval` itself."""
    chosen = [part for task in GENERATED for part in ("--task", task)]
    options = ["--dtype", "float32", "--max-num-batched-tokens", str(ROWS), "--steps", str(STEPS)]
    done = jdllm(environment, "--json", "--instances", str(LIMIT), *options, *chosen)
    assert done.returncode == 0, done.stderr
    return {found["task"]: found["exact_match"] for found in json.loads(done.stdout)["tasks"]}


def names(*tasks: str) -> str:
    return ",".join(f"jdllm_demo_{task}" for task in tasks)


def test_our_command_agrees_with_our_own_evaluation(
    environment: dict[str, str], own_shares: dict[str, float], tmp_path: Path
):
    model = f"dtype=float32,max_num_batched_tokens={ROWS},steps={STEPS},mc_num=16,is_check_greedy=False"
    found = harness(environment, tmp_path, "--tasks", names(*GENERATED, "choices"), "--model_args", model)
    assert 0 < own_shares["retrieval"] < 1  # so that both have to find the same ones
    for task in GENERATED:
        assert found[names(task)]["exact_match,none"] == pytest.approx(own_shares[task])
    assert found[names("choices")]["acc,none"] > 0.5  # by chance 0.25


def test_a_task_that_nobody_knows(environment: dict[str, str]):
    done = jdllm(environment, "--harness", "--tasks", "cooking")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: lm-eval: Tasks not found: cooking"


def right_choice(llm: LLM, instance: tasks.Instance) -> bool:
    """Whether the right sum has the highest pseudo-log-likelihood among the task's choices."""
    right, prompt = int(instance.answer), plain_ids(instance.prompt)
    options = sorted({right - 10, right, right + 1, right + 10})
    worth = [
        sum(token.logprob for token in llm.pseudo_likelihood(prompt + plain_ids(str(option)))[len(prompt) :])
        for option in options
    ]
    return options[int(np.argmax(worth))] == right


def test_its_client_of_completions_servers(
    server: Server,
    llm: LLM,
    environment: dict[str, str],
    own_shares: dict[str, float],
    tmp_path: Path,
):
    key = str(server.api_key)
    address = f"model={MODEL},base_url={server.url}/v1/completions,auth_token={key}"
    arguments = [
        *("--model", "local-completions", "--tasks", names("addition", "choices")),
        *("--model_args", f"{address},num_concurrent=4,max_length=512"),
        *("--gen_kwargs", f"steps={STEPS}"),
    ]
    found = harness({**environment, "OPENAI_API_KEY": key}, tmp_path, *arguments)
    assert found[names("addition")]["exact_match,none"] == pytest.approx(own_shares["addition"])
    right = [right_choice(llm, one) for one in tasks.test_instances("addition", LIMIT, seed=1)]
    assert found[names("choices")]["acc,none"] == pytest.approx(np.mean(right))
