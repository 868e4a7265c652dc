"""Special tokens as plain text: what a user writes is never read as one, whatever a tokenizer makes of it."""

import functools
import json
import re
import secrets
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from tokenizers import Tokenizer, models

_LETTERS = 0x13000
"""The first of many letters (hieroglyphs) that no normalizer changes, joins with others or leaves out."""


class _Found(NamedTuple):
    """A special token in a text: its id and its characters, without spaces around that it takes in."""

    index: int
    start: int
    stop: int


class SpecialTokens:
    """The special tokens of one tokenizer.

    What a user writes is spelled with a word that nobody can guess, as the parts of a MIME message are told
    apart. So a chat template may put texts together, and what the template says itself is still known. That
    gets names of the same kind, in a tokenizer that knows special tokens by these names only.

    Arguments:
    - `tokenizer`: reads text; every special token in it, as its files define them.
    - `unknown`: the token of what the vocabulary lacks; plain text may become it.
    """

    def __init__(self, tokenizer: Tokenizer, unknown: str | None):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = dict(sorted(tokenizer.get_added_tokens_decoder().items()))
        self._contents = {index: token.content for index, token in added.items() if token.special}
        self._unknown = None if unknown is None else tokenizer.token_to_id(unknown)
        self._secret, *names = (_spelled(secrets.token_bytes(16)) for _ in range(len(self._contents) + 1))
        self._names = dict(zip(self._contents, names, strict=True))
        changes = tokenizer.normalizer is not None
        self._literal = not any(t.normalized and t.special and changes for t in added.values())
        # It finds what was added to the vocabulary, and knows nothing else.
        self._finder = Tokenizer(models.BPE())
        if tokenizer.normalizer is not None:
            self._finder.normalizer = tokenizer.normalizer
        self._finder.add_tokens(list(added.values()))
        self._found = {self._finder.token_to_id(content): i for i, content in self._contents.items()}
        contents = {*self._contents.values(), *map(self._normalized, self._contents.values())}
        self._beginnings = {content[:n] for content in contents for n in range(1, len(content))}
        self._longest = max(map(len, self._beginnings), default=0)

    def protect(self, text: str, parsed: Collection[str] = ()) -> str:
        """Spell every special token in `text`, except the tokens in `parsed`, as plain text.

        Other spellings count too, if the tokenizer reads them as the token. The beginning of a special token
        at the very end of the text, or before spaces there, is spelled as well: a chat template may continue
        the text with the rest of the token.
        """
        found = [(at.start, at.stop) for at in self._find(text) if self._contents[at.index] not in parsed]
        end = len(text.rstrip())
        start = end - self._begun(text[:end])
        if start < end and (not found or found[-1][1] <= start):
            found.append((start, end))
        return _replaced(text, ((*span, self._spell(text[slice(*span)])) for span in found))

    def restore(self, text: str) -> str:
        """The text behind a protected one."""
        letters = f"[{chr(_LETTERS)}-{chr(_LETTERS + 0xFF)}]"
        return re.sub(f"{self._secret}({letters}*?){self._secret}", lambda found: _read(found[1]), text)

    def encode(self, text: str, *, adds_special: bool) -> list[int]:
        """Ids of a protected text; `adds_special`: with the special tokens that the tokenizer adds by itself.

        What is protected becomes what it is for a tokenizer without special tokens.
        """
        meant = self._find(text)
        if self._secret not in text:
            encoding = self._tokenizer.encode(text, add_special_tokens=adds_special)
            made = self._count(encoding.ids) - sum(encoding.special_tokens_mask)
            if made == self._count(at.index for at in meant):
                return encoding.ids
        named = _replaced(text, ((at.start, at.stop, self._names[at.index]) for at in meant))
        return self._reader.encode(self.restore(named), add_special_tokens=adds_special).ids

    def _count(self, ids: Iterable[int]) -> int:
        """How many of `ids` are special tokens that plain text may not become."""
        return sum(index in self._contents and index != self._unknown for index in ids)

    def _find(self, text: str) -> list[_Found]:
        """The special tokens that the tokenizer takes from a text before it looks at its vocabulary."""
        if self._literal and not any(content in text for content in self._contents.values()):
            return []
        encoding = self._finder.encode(text, add_special_tokens=False)
        found = []
        for mark, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if mark in self._found:
                index = self._found[mark]
                content = self._contents[index]
                core = content if content in text[start:stop] else text[start:stop].strip()
                start = text.index(core, start)
                found.append(_Found(index, start, start + len(core)))
        return found

    def _begun(self, text: str) -> int:
        """How many characters at the end of a text may begin a special token."""
        ends = (text[-n:] for n in range(min(len(text), self._longest), 0, -1))
        return next((len(end) for end in ends if {end, self._normalized(end)} & self._beginnings), 0)

    def _normalized(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def _spell(self, text: str) -> str:
        return self._secret + _spelled(text.encode()) + self._secret

    @functools.cached_property
    def _reader(self) -> Tokenizer:
        """The tokenizer, which knows special tokens by their names here and by no other."""
        state: dict[str, Any] = json.loads(self._tokenizer.to_str())
        for token in state["added_tokens"]:
            token["content"] = self._names.get(token["id"], token["content"])
        model, contents = state["model"], {content: self._names[i] for i, content in self._contents.items()}
        if isinstance(model["vocab"], dict):
            model["vocab"] = {contents.get(piece, piece): index for piece, index in model["vocab"].items()}
        else:
            model["vocab"] = [[contents.get(piece, piece), score] for piece, score in model["vocab"]]
        if model.get("unk_token") in contents:
            model["unk_token"] = contents[model["unk_token"]]
        if "merges" in model:
            unknown = contents.keys()
            model["merges"] = [pair for pair in model["merges"] if not {*pair, "".join(pair)} & unknown]
        return Tokenizer.from_str(json.dumps(state))


def _replaced(text: str, spans: Iterable[tuple[int, int, str]]) -> str:
    """A text with others in place of some of its characters: starts, stops and texts, rising."""
    parts, done = [], 0
    for start, stop, new in spans:
        parts += [text[done:start], new]
        done = stop
    return "".join([*parts, text[done:]])


def _spelled(data: bytes) -> str:
    return "".join(chr(_LETTERS + byte) for byte in data)


def _read(letters: str) -> str:
    return bytes(ord(letter) - _LETTERS for letter in letters).decode()
