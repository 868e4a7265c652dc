"""Types, for pydantic, of parameters that control logits."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from jdllm.declarations import listed, plain

_LARGEST_BIAS = 100
_BIASES = "token ids with numbers from -100 to 100, as {42: -5.0}"

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def _read_bias(value: object) -> object:
    """A mapping whose keys may be ids as texts, as JSON has them."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise PydanticCustomError("expected", _BIASES)
    return {_read_id(plain(key)): _read_number(plain(by)) for key, by in value.items()}


def _read_id(key: object) -> int:
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10:
        key = int(key)
    if type(key) is not int or not 0 <= key < 2**31:
        raise PydanticCustomError("expected", _BIASES)
    return key


def _read_number(by: object) -> float:
    if isinstance(by, bool) or not isinstance(by, int | float) or not abs(by) <= _LARGEST_BIAS:
        raise PydanticCustomError("expected", _BIASES)
    return float(by)


def _read_ids(value: object) -> object:
    """One id, or a list, a set or an array of ids, as a tuple."""
    value = listed(value)
    if value is None:
        return None
    if not isinstance(value, list | tuple | set | frozenset | range):
        return (plain(value),)
    if not value:
        raise PydanticCustomError("expected", "at least one token id")
    return tuple(map(plain, value))


def _read_words(value: object) -> object:
    """One text, or a list of texts and of lists of ids, as a tuple."""
    value = listed(value)
    if value is None:
        return ()
    words = value if isinstance(value, list | tuple) else [value]
    return tuple(map(_read_word, words))


def _read_word(word: object) -> object:
    word = listed(word)
    if not word or not isinstance(word, str | list | tuple):
        raise PydanticCustomError("expected", "texts or lists of token ids, as ['word', [5, 6]]")
    return word if isinstance(word, str) else tuple(map(plain, word))


LogitBias = Annotated[dict[TokenId, float] | None, BeforeValidator(_read_bias)]
AllowedIds = Annotated[
    Annotated[tuple[TokenId, ...], Field(min_length=1, fail_fast=True)] | None, BeforeValidator(_read_ids)
]
_Text = Annotated[str, Field(min_length=1, max_length=1024)]
_Ids = Annotated[tuple[TokenId, ...], Field(min_length=1)]
BadWords = Annotated[tuple[_Text | _Ids, ...], Field(max_length=1024), BeforeValidator(_read_words)]
