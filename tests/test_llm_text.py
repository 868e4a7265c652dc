"""The public class with a tokenizer: texts, conversations, and what they may hold."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.demo import tokenizer as demo
from jdllm.errors import RequestError
from jdllm.llm import LLM
from jdllm.scoring import Likelihood
from tests.conftest import LLADA

SHORT = SamplingParams(gen_length=8, steps=4)
MASK = "<|mdm_mask|>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with the tokenizer of the bundled model: a token a byte."""
    path = tmp_path_factory.mktemp("speaking")
    shutil.copy(LLADA.directory / "model.safetensors", path)
    config = json.loads((LLADA.directory / "config.json").read_text())
    ids = {"mask_token_id": demo.MASK, "eos_token_id": demo.EOS, "eot_token_id": demo.EOT}
    (path / "config.json").write_text(json.dumps({**config, **ids}))
    (path / "generation_config.json").write_text(json.dumps({"gen_length": 8, "steps": 4}))
    demo.write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def speaking(directory: Path) -> LLM:
    return LLM(directory, dtype="float32", max_num_batched_tokens=64)


def ids_of(llm: LLM, prompts: Any, **options) -> list[list[int]]:
    return [o.prompt_token_ids for o in llm.generate(prompts, SHORT, **options)]


def test_a_users_text_never_becomes_special_tokens(speaking: LLM):
    texts = ["1+1=", f"1{MASK}<|eot_id|>", "plain"]
    assert ids_of(speaking, texts) == [list(text.encode()) for text in texts]


def test_special_tokens_are_parsed_where_that_is_asked_for(speaking: LLM):
    assert ids_of(speaking, "<|eot_id|>1", parse_special=True) == [[demo.EOT, ord("1")]]
    with pytest.raises(RequestError, match="prompt 1: the prompt contains the mask id 261"):
        speaking.generate(["a", MASK], SHORT, parse_special=True)


def test_texts_dicts_and_ids_mix(speaking: LLM):
    prompts = ["ab", {"prompt": "cd"}, {"prompt_token_ids": [5, 6]}]
    outputs = speaking.generate((p for p in prompts), SHORT)
    assert [(o.prompt, o.prompt_token_ids) for o in outputs] == [
        ("ab", [*b"ab"]),
        ("cd", [*b"cd"]),
        (None, [5, 6]),
    ]


def test_nothing_runs_where_the_last_prompt_is_wrong(speaking: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(speaking.engine, "add", None)
    with pytest.raises(RequestError, match=r"prompts\[2\] is None"):
        speaking.generate((text for text in ["a", "b", None]), SHORT)  # pyright: ignore
    with pytest.raises(RequestError, match=r"prompt 1: .*U\+DC80, at character 2"):
        speaking.generate(["a", "ab\udc80"], SHORT)


def test_infill_parses_the_mask_and_no_other_token(speaking: LLM):
    (output,) = speaking.infill(f"a{MASK}<|eot_id|>")
    assert output.prompt_token_ids == [ord("a"), demo.MASK, *b"<|eot_id|>"]
    (parsed,) = speaking.infill(f"a{MASK}<|eot_id|>", parse_special=True)
    assert parsed.prompt_token_ids == [ord("a"), demo.MASK, demo.EOT]


def test_score_takes_texts_as_they_are(speaking: LLM, monkeypatch: pytest.MonkeyPatch):
    scored: list[list[int]] = []

    def note(pairs, *_):
        for pair in pairs:
            scored.append([*pair.prompt.tolist(), *pair.answer.tolist()])
            yield Likelihood(0.0, None, 1)

    monkeypatch.setattr(speaking.scorer, "likelihoods", note)
    speaking.score("a", "<|eot_id|>")
    speaking.score("a", "<|eot_id|>", parse_special=True)
    assert scored == [list(b"a<|eot_id|>"), [ord("a"), demo.EOT]]


class TestChat:
    def test_the_template_surrounds_plain_text(self, speaking: LLM):
        (output,) = speaking.chat(f"hi {MASK}", SHORT)
        assert output.prompt_token_ids == demo.chat_ids(f"hi {MASK}")
        assert output.prompt == speaking.chat_prompt(f"hi {MASK}")
        (same,) = speaking.chat([{"role": "user", "content": f"hi {MASK}"}], sampling=SHORT)
        assert same == output

    def test_several_conversations(self, speaking: LLM):
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        conversations = [[{"role": "user", "content": "one"}], [{"role": "user", "content": parts}]]
        outputs = speaking.chat(conversations, SHORT)
        assert [o.prompt_token_ids for o in outputs] == [demo.chat_ids("one"), demo.chat_ids("one\ntwo")]

    def test_a_rendered_prompt_needs_its_special_tokens_parsed(self, speaking: LLM):
        prompt = speaking.chat_prompt("hi")
        assert ids_of(speaking, prompt, parse_special=True) == [demo.chat_ids("hi")]

    def test_a_wrong_message_is_named(self, speaking: LLM):
        right = {"role": "user", "content": "hi"}
        with pytest.raises(RequestError, match=r"prompt 1: message 1 is {'role': 'user'}"):
            speaking.chat([[right], [right, {"role": "user"}]])


def test_stop_strings_end_a_generation(speaking: LLM):
    options = {"gen_length": 32, "block_length": 8, "undefined_tokens": "banned", "temperature": 1.0}
    (whole,) = speaking.generate("ab", SamplingParams(**options, early_stop=False))
    assert whole.text is not None
    stop = next(c for c in whole.text[8:] if c.isascii() and c not in whole.text[:8])
    (stopped,) = speaking.generate("ab", SamplingParams(**options, stop=(stop,)))
    assert (stopped.text, stopped.finish_reason) == (whole.text.split(stop)[0], "stop")
    assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
    assert stopped.token_ids[-1] == ord(stop)
    assert stopped.nfe == -(-len(stopped.token_ids) // 8) * 8


class TestSamplingParams:
    def test_both_names_are_one(self, speaking: LLM):
        by_position, by_name = speaking.generate("ab", SHORT), speaking.generate("ab", sampling=SHORT)
        assert by_position == by_name
        assert by_name == speaking.generate("ab", sampling_params=[SHORT])
        for call in (speaking.generate, speaking.infill, speaking.chat):
            with pytest.raises(RequestError, match="sampling and sampling_params are one"):
                call("ab", SHORT, sampling=SHORT)

    def test_without_any_those_of_the_checkpoint_apply(self, speaking: LLM):
        assert speaking.default_sampling() == SHORT
        assert speaking.generate("ab") == speaking.generate("ab", SHORT)
        assert speaking.chat("ab") == speaking.chat("ab", SHORT)
        assert speaking.generate("ab", SamplingParams(gen_length=8))[0].nfe == 8

    def test_infill_takes_as_many_steps_as_masks(self, speaking: LLM):
        assert [speaking.infill(f"a{MASK * n}")[0].nfe for n in (1, 5)] == [1, 5]

    def test_a_model_in_memory_has_those_of_the_class(self, llm: LLM):
        assert llm.default_sampling() == SamplingParams()
