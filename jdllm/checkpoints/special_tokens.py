"""Special tokens as plain text: what a user writes is spelled so that a tokenizer sees none in it."""

import functools
import json
from collections import Counter
from collections.abc import Collection
from typing import Any

from tokenizers import Tokenizer

from jdllm.errors import RequestError

_ESCAPE = "\ufdd0"  # a noncharacter, which Unicode keeps from interchanged text; doubled where a text has it
_MARKS = 0x100000


class SpecialTokens:
    """The special tokens of one tokenizer.

    Arguments:
    - `tokenizer`: reads text; every special token in it, as its files define them.
    - `tokens`: their texts.
    - `unknown`: the token of what the vocabulary lacks; plain text may become it.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: Collection[str], unknown: str | None):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._tokens = sorted(filter(None, tokens), key=len, reverse=True)
        self._unknown = unknown
        firsts = [_ESCAPE, *sorted({token[0] for token in self._tokens})]
        self._marks = {first: _ESCAPE + chr(_MARKS + i) for i, first in enumerate(firsts)}

    def protect(self, text: str, parsed: Collection[str] = ()) -> str:
        """Spell every special token in `text`, but those of `parsed`, so that it is none.

        Its first character is marked. That of a beginning at the very end of the text is too: what follows
        it, in a chat template, may be the rest.
        """
        text = text.replace(_ESCAPE, self._marks[_ESCAPE])
        for token in self._tokens:
            if token not in parsed:
                text = text.replace(token, self._marks[token[0]] + token[1:])
        for token in self._tokens:
            begun = next((n for n in range(len(token) - 1, 0, -1) if text.endswith(token[:n])), 0)
            if begun and token not in parsed:
                text = text[:-begun] + self._marks[token[0]] + token[1:begun]
        return text

    def restore(self, text: str) -> str:
        """The text behind a protected one."""
        for character, mark in reversed(self._marks.items()):
            text = text.replace(mark, character)
        return text

    def encode(self, text: str, *, adds_special: bool) -> list[int]:
        """Ids of a protected text; `adds_special`: with the special tokens that the tokenizer adds by itself.

        Raises `RequestError` where the vocabulary itself, rather than the list of special tokens, makes one
        of plain text.
        """
        plain = self._tokenizer.encode(text, add_special_tokens=adds_special).ids
        if _ESCAPE not in text:
            return plain
        ids = self._reader.encode(text, add_special_tokens=adds_special).ids
        meant = self._count(plain)
        wrong = self._count(ids) - meant
        if wrong:
            raise RequestError(
                f"the text holds {self._tokenizer.id_to_token(next(iter(wrong)))!r}, which this tokenizer"
                " knows as a special token only: leave it out, or pass parse_special=True"
            )
        return ids

    def _count(self, ids: list[int]) -> Counter[int]:
        special = {self._tokenizer.token_to_id(t) for t in self._tokens if t != self._unknown}
        return Counter(i for i in ids if i in special)

    @functools.cached_property
    def _reader(self) -> Tokenizer:
        """The tokenizer with a normalizer that restores what is protected, once special tokens are found."""
        state: dict[str, Any] = json.loads(self._tokenizer.to_str())
        for token in state["added_tokens"]:
            if token["content"] in self._tokens:
                token["normalized"] = False
        restoring = [
            {"type": "Replace", "pattern": {"String": mark}, "content": character}
            for character, mark in reversed(self._marks.items())
        ]
        own = [state["normalizer"]] if state["normalizer"] else []
        state["normalizer"] = {"type": "Sequence", "normalizers": restoring + own}
        return Tokenizer.from_str(json.dumps(state))
