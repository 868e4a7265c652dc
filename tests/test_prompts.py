"""What is read as prompts, from which types, and how what is none is named."""

from typing import Any

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.prompts import LongPrompt, Prompt, read_conversations, read_prompts, sampling_for_each
from jdllm.serving.long.request import LongContext

NAMES = ("prompts", "prompt_token_ids")


def encode(text: str, *, begins: bool = True) -> list[int]:
    if "?" in text:
        raise RequestError("no questions")
    return [0] * text.startswith("<") * begins + list(text.encode())


def read(prompts: Any = None, token_ids: Any = None) -> list[Prompt]:
    return read_prompts(prompts, token_ids, encode, NAMES)


PARTS: Any = ([0, 60, 105], [60, 99], [60, 113], [60, 113])
A, B = Prompt("a", [97]), Prompt(None, [1, 2])


class TestLongPrompts:
    def test_parts_are_read_one_by_one(self):
        prompt = LongPrompt(instruction="<i", context="<c", query="<q")
        expected = Prompt("<i<c<q", LongContext(*PARTS))
        assert read(prompt) == read([prompt]) == [expected]
        assert read({"instruction": "<i", "context": "<c", "query": "<q"}) == [expected]

    def test_ids_and_another_query_for_the_scores(self):
        (prompt,) = read(LongPrompt(context=[1], query=np.array([2]), scoring_query="s"))
        assert prompt.text is None
        ids: Any = prompt.ids
        assert [list(part) for part in ids] == [[], [1], [2], [115]]

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"context": "", "query": "q"}, "the context of a long prompt is empty"),
            ({"context": "c", "query": []}, "the query of a long prompt is empty"),
            ({"context": 5, "query": "q"}, "context of a long prompt is 5, expected a text or ids"),
            ({"context": "c", "query": "q", "answer": "a"}, "a LongPrompt"),
        ],
    )
    def test_what_is_none_is_named(self, fields: dict[str, Any], words: str):
        with pytest.raises(RequestError, match=words):
            read(fields)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("a", [A]),
        (["a", "a"], [A, A]),
        (("a",), [A]),
        ((text for text in "aa"), [A, A]),
        ({"a": 1}.keys(), [A]),
        ({"prompt": "a"}, [A]),
        ({"prompt_token_ids": [1, 2]}, [B]),
        ([{"prompt": "a"}, "a", {"prompt_token_ids": [1, 2]}], [A, A, B]),
        (np.array(["a", "a"]), [A, A]),
        ([], []),
        ((), []),
    ],
)
def test_prompts(prompts: Any, expected: list[Prompt]):
    assert read(prompts) == expected


@pytest.mark.parametrize("ids", [[[1, 2]], ([1, 2],), iter([[1, 2]])])
def test_ids(ids: Any):
    assert read(None, ids) == [B]


def test_rows_of_an_array_are_prompts():
    assert [p.ids.tolist() for p in read(None, np.array([[1, 2], [3, 4]]))] == [[1, 2], [3, 4]]  # pyright: ignore


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (b"text", r"prompts is b'text', expected one entry"),
        (5, r"prompts is 5, expected one entry"),
        (["a", b"text"], r"prompts\[1\] is b'text', expected a text"),
        (["a", None], r"prompts\[1\] is None, expected a text"),
        ([7, "a"], r"prompts\[0\] is 7, expected a text"),
        (["a", [1, 2]], r"prompts\[1\] is \[1, 2\], expected a text, .*'prompt_token_ids': ids"),
        ({"text": "a"}, r"prompts is \{'text': 'a'\}, expected .*\{'prompt': text\}"),
        ({}, r"prompts is \{\}, expected"),
        ({"prompt": 5}, r"prompts is \{'prompt': 5\}, expected"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompts is .*, expected"),
        (["a", {"prompt": "a", "multi_modal_data": {}}], r"prompts\[1\] is .*'multi_modal_data'.*, expected"),
        (["a", "b?"], "prompt 1: no questions"),
        ("b?", "^no questions"),
    ],
)
def test_what_is_no_prompt_is_named(prompts: Any, message: str):
    with pytest.raises(RequestError, match=message):
        read(prompts)


@pytest.mark.parametrize("ids", [5, "12", b"12", {"prompt_token_ids": [1]}])
def test_what_are_no_ids_is_named(ids: Any):
    with pytest.raises(RequestError, match=r"prompt_token_ids is .*, expected one entry"):
        read(None, ids)


def test_long_values_are_abridged():
    with pytest.raises(RequestError) as refused:
        read([["a"] * 10_000])
    assert len(str(refused.value)) < 300


MESSAGE = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("a", [[MESSAGE]]),
        ([MESSAGE, MESSAGE], [[MESSAGE, MESSAGE]]),
        ((m for m in [MESSAGE]), [[MESSAGE]]),
        ([[MESSAGE], [MESSAGE, MESSAGE]], [[MESSAGE], [MESSAGE, MESSAGE]]),
        ([], [[]]),
    ],
)
def test_conversations(messages: Any, expected: list):
    assert read_conversations(messages) == expected


@pytest.mark.parametrize("messages", [None, 5, b"a", MESSAGE])
def test_what_is_no_conversation_is_refused(messages: Any):
    with pytest.raises(RequestError, match=r"messages is .*, expected"):
        read_conversations(messages)


def test_sampling_for_each():
    a, b = SamplingParams(seed=1), SamplingParams(seed=2)
    assert sampling_for_each(a, 2) == [a, a]
    assert sampling_for_each(iter([a, b]), 2) == [a, b]
