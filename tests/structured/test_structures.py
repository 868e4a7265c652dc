"""What may be said of the form of an answer, and mistakes in it."""

import contextlib
import dataclasses
import itertools
import json
import re
import threading
from typing import Any, cast

import pytest

from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.structured.grammars import KEPT, Grammars
from jdllm.structured.structure import MOST_CHARACTERS, Structure
from tests.structured.writing import EOS

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}

WRONG_VALUES: dict[str, tuple[Any, str]] = {
    "none": ({}, "structure has nothing, expected one of json_schema, json_object"),
    "off": ({"json_object": False}, "structure has nothing, expected one of"),
    "two": ({"regex": "a", "choice": ["b"]}, "structure has regex and choice, expected one of"),
    "unknown": ({"xml": "a"}, "there is no parameter xml"),
    "no mapping": ("a+", "structure is 'a+', expected Structure, or its field in a mapping"),
    "schema": ({"json_schema": 5}, "json_schema is 5, expected a JSON schema"),
    "schema that is no JSON": ({"json_schema": "{"}, "json_schema is '{', expected a JSON schema"),
    "infinite": ({"json_schema": {"maximum": float("inf")}}, "expected a JSON schema"),
    "expression": ({"regex": 5}, "regex is 5, expected"),
    "empty expression": ({"regex": ""}, "regex is '', expected"),
    "no choice": ({"choice": []}, "choice is (), expected"),
    "a choice": ({"choice": "yes"}, "choice is 'yes', expected"),
    "empty choice": ({"choice": ["yes", ""]}, "choice is '', expected"),
    "surrogate": ({"choice": ["\ud800"]}, "choice is '\\ud800', expected"),
    "long": ({"regex": "a" * (MOST_CHARACTERS + 1)}, f"a regex of {MOST_CHARACTERS + 1} characters"),
}


@pytest.mark.parametrize("case", WRONG_VALUES)
def test_what_is_no_structure(case: str):
    value, message = WRONG_VALUES[case]
    with pytest.raises(RequestError) as caught:
        SamplingParams(structure=value)
    assert message in str(caught.value)
    assert str(caught.value).startswith("structure ")


def test_a_schema_in_any_form_is_kept_as_it_was_written():
    """Properties keep their order, which is that of the answer."""
    asked = [SCHEMA, json.dumps(SCHEMA)]
    found = {Structure(json_schema=schema) for schema in asked}
    assert [json.loads(one.json_schema or "") for one in found] == [SCHEMA]
    assert list(json.loads(found.pop().json_schema or "")["properties"]) == ["b", "a"]
    assert SamplingParams(structure={"json_schema": True}).structure == Structure(json_schema="true")  # pyright: ignore[reportArgumentType]


NOT_TOGETHER: dict[str, Any] = {
    "cfg_scale": 1.0,
    "stop": "a",
    "stop_token_ids": 5,
    "early_stop": False,
    "min_tokens": 3,
    "logits_eos_inf": True,
    "allowed_token_ids": [5],
    "bad_words": ["a"],
    "prefilling": "dream",
}


@pytest.mark.parametrize("name", NOT_TOGETHER)
def test_what_does_not_go_with_a_structure(name: str):
    with pytest.raises(RequestError, match=f"structure does not go with {name}: .*; leave {name} at "):
        SamplingParams(structure=Structure(choice=("a",)), **{name: NOT_TOGETHER[name]})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "keyword": ({"json_schema": {"uniqueItems": True}}, 'uses "uniqueItems", which is not supported'),
    "type": ({"json_schema": {"type": "objectt"}}, "cannot be used: Invalid type: objectt"),
    "nothing": ({"json_schema": {"minimum": 5, "maximum": 3, "type": "integer"}}, "minimum (5) is greater"),
    "reference": ({"json_schema": {"$ref": "http://a.b/c"}}, "cannot be used: Resource 'http://a.b/c'"),
    "lenient": ({"json_schema": {"not": {}, "x-guidance": {"lenient": True}}}, 'uses "not"'),
    "expression": ({"regex": "(a"}, "error: unclosed group"),
    "look-around": ({"regex": "(?=a)a"}, "look-around"),
    "grammar": ({"grammar": "start: x"}, 'a grammar that cannot be used: at 1(8): unknown name: "x"'),
    "endless": ({"grammar": "start: a\na: a\n"}, "a grammar that cannot be used: nothing can be written"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used(llm: LLM, case: str):
    """Before anything runs, each time, in one line."""
    structure, message = REFUSED[case]
    before = llm.engine.stats()
    for _ in range(2):
        with pytest.raises(RequestError) as caught:
            llm.generate("a", SamplingParams(structure=Structure(**structure)))
        assert message in str(caught.value)
        assert str(caught.value).startswith(f"structure has a {next(iter(structure))} that ")
        assert len(str(caught.value).splitlines()) == 1
    assert llm.engine.stats() == before


class _Letters:
    """A tokenizer of some letters and a syllable."""

    special_ids = frozenset({5})

    def __init__(self, *tokens: str):
        self.tokens = tokens

    def token_bytes(self, index: int) -> bytes:
        return self.tokens[index].encode() if index < len(self.tokens) else b""


def letters(config: ModelConfig, *tokens: str) -> Grammars:
    small = dataclasses.replace(config, vocab_size=len(tokens), eos_id=5, more_eos_ids=(), eot_id=None)
    return Grammars(cast(Tokenizer, _Letters(*tokens)), small)


def test_a_choice_that_the_tokenizer_cannot_write(llm: LLM):
    grammars = letters(llm.config, "a", "b", "cd", "dc", "é", "</s>", "abc")
    for text in ("ab", "cd", "cdcd", "bé", "abcb", "adc"):
        grammars.compiled(Structure(choice=("a", text)))
    for text in ("c", "cdc", "e", "ab\u00fc", "</s>", "abcd e"):
        with pytest.raises(RequestError, match="which the tokenizer cannot write"):
            grammars.compiled(Structure(choice=("a", text)))


def ids(mask: Any) -> set[int]:
    return {
        32 * word + bit for word, bits in enumerate(mask.tolist()) for bit in range(32) if bits >> bit & 1
    }


def test_masks_against_all_strings(llm: LLM):
    """Which tokens may follow, against a search of all texts up to some length."""
    tokens = ("a", "b", "ab", "ba", "c", "</s>", "cab")
    pattern = re.compile("(ab)*c?|b+a")
    texts = {"".join(t) for n in range(7) for t in itertools.product("abc", repeat=n)}
    whole = {text for text in texts if pattern.fullmatch(text)}
    beginnings = {text[:end] for text in whole for end in range(len(text) + 1)}
    grammar = letters(llm.config, *tokens).compiled(Structure(regex=pattern.pattern))
    for length in range(3):
        for chosen in itertools.product([i for i in range(len(tokens)) if i != 5], repeat=length):
            text, matcher = "", grammar.matcher()
            for token in chosen:
                if text + tokens[token] not in beginnings:
                    break
                text += tokens[token]
                matcher.take([token])
            else:
                expected = {i for i, token in enumerate(tokens) if i != 5 and text + token in beginnings}
                assert ids(matcher.allowed()) == expected | ({5} if text in whole else set()), text


def test_the_end_of_a_text_has_several_ids(llm: LLM):
    assert llm.tokenizer is not None
    config = dataclasses.replace(llm.config, more_eos_ids=(7,), eot_id=502)
    matcher = Grammars(llm.tokenizer, config).compiled(Structure(regex="\x07?a")).matcher()
    assert ids(matcher.allowed()) == {ord("a")}  # id 7 would be the byte 7
    matcher.take([ord("a")])
    assert ids(matcher.allowed()) == {7, EOS, 502}


def test_grammars_are_kept(llm: LLM):
    assert llm.tokenizer is not None
    grammars = Grammars(llm.tokenizer, llm.config)
    first = grammars.compiled(Structure(choice=("a",)))
    for i in range(KEPT - 1):
        grammars.compiled(Structure(choice=(f"{i}",)))
    assert grammars.compiled(Structure(choice=("a",))) is first
    grammars.compiled(Structure(choice=("another",)))
    assert grammars.compiled(Structure(choice=("a",))) is first
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(grammars.compiled(Structure(regex="[ab]{9}"))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


HOSTILE: dict[str, dict[str, Any]] = {
    "repeated": {"regex": "(a{1000}){1000}b"},
    "alternatives": {
        "json_schema": {
            "allOf": [
                {"anyOf": [{"type": "string", "pattern": f"{letter}{i}"} for letter in "ab"]}
                for i in range(24)
            ]
        }
    },
    "nested": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "deep": {"json_schema": json.loads('{"items":' * 300 + "{}" + "}" * 300)},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_structures_are_refused_or_harmless(llm: LLM, case: str):
    with contextlib.suppress(RequestError):
        [output] = llm.generate("a", SamplingParams(structure=Structure(**HOSTILE[case]), max_tokens=4))
        assert len(output.token_ids) <= 4
