"""What tokens say: the bytes of each, and the text of some that stand behind others."""

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Ids = Sequence[int] | np.ndarray

_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
_LONGEST_BEGINNING = 3
"""Bytes of a character of UTF-8 that are not yet a character, at most."""


_SKIPPED = 16
"""Characters that a tokenizer may leave out between two tokens."""


class Decode(Protocol):
    """Ids to text, as `TokenText.decode`."""

    def __call__(self, ids: Ids, before: Ids = (), *, final: bool = True) -> str: ...


class TokenText:
    """The texts of one tokenizer's tokens.

    A token has the same bytes wherever it stands, but for the first one of a text: there a decoder drops the
    space that began its word. So the text of tokens is made of the bytes of each, and takes no more time
    behind a long text than behind a short one. Where the bytes are UTF-8, it is the text of the library.

    Arguments:
    - `tokenizer`: of the library; its special tokens give no text.
    """

    def __init__(self, tokenizer: "Tokenizer"):
        # Transformers takes seconds to import, which who reads a tokenizer has waited for already.
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {index: token.content for index, token in added.items() if token.special}
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
        kinds = {step["type"] for step in decoder.get("decoders", [decoder]) if step}
        self._alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
        self._byte_level, self._byte_pieces = "ByteLevel" in kinds, "ByteFallback" in kinds
        self._errors = _EACH_BYTE if self._byte_pieces else "replace"
        self._known: dict[int, bytes | None] = {}
        self._anchor = None if self._byte_level else self._find_anchor()

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which give no text."""
        return frozenset(self._special)

    def name(self, index: int) -> str | None:
        """The token of an id as the vocabulary has it, or `None` where the id is not defined."""
        return self._special.get(index) or self._tokenizer.id_to_token(index)

    def token_bytes(self, index: int) -> bytes:
        """The bytes of a token that is not the first of a text, which may be a part of a character: of a
        special token those of its name, of an id that is not defined none."""
        if index in self._special:
            return self._special[index].encode()
        return self._said(index) or b""

    def decode(self, ids: Ids, before: Ids = (), *, final: bool = True) -> str:
        """The text of `ids` without special tokens; ids that the tokenizer does not define give no text.

        Arguments:
        - `before`: ids that stand before them. A character that is begun there belongs to this text.
        - `final`: whether nothing follows; otherwise a character that is begun at the end is left out.

        Bytes that are no UTF-8 become U+FFFD.
        """
        begun, rest = self._behind(before)
        return self._decoder().decode(rest + b"".join(self._pieces(ids, begun)), final)

    def offsets(self, ids: Ids, before: Ids = ()) -> list[int]:
        """Where in `decode(ids, before)` each of `ids` begins: the index of the character that has its first
        byte, and for a token without text of the one that comes next."""
        begun, rest = self._behind(before)
        decoder, offsets, length = self._decoder(), [], 0
        decoder.decode(rest)
        for piece in self._pieces(ids, begun):
            unfinished = decoder.getstate()[0]
            starts = bool(piece) and not 0x80 <= piece[0] < 0xC0
            offsets.append(length + (len(unfinished.decode(errors=self._errors)) if starts else 0))
            length += len(decoder.decode(piece))
        return offsets

    def offsets_in(self, text: str, ids: Ids) -> list[int]:
        """Where in `text`, which was encoded as `ids`, each of them begins.

        Where a tokenizer does not give back what it read (it normalizes, or has no token for a character), a
        token is looked for behind the one before, and has its place where that is not found.
        """
        offsets, said = self.offsets(ids), self.decode(ids)
        if said == text:
            return offsets
        places, at = [], 0
        for index, start, stop in zip(ids, offsets, [*offsets[1:], len(said)], strict=True):
            special = self._special.get(int(index))
            name = said[start:stop] if special is None else special
            found = text.find(name, at, at + len(name) + (_SKIPPED if special is None else 0))
            places.append(max(at, found))
            at = at if found < 0 else found + len(name)
        return places

    def _decoder(self) -> codecs.IncrementalDecoder:
        return codecs.getincrementaldecoder("utf-8")(self._errors)

    def _behind(self, before: Ids) -> tuple[bool, bytes]:
        """Whether tokens before a text give any, and the bytes of a character that they leave unfinished."""
        begun, tail = False, b""
        for index in reversed(before):
            said = self._said(int(index))
            if said is not None:
                begun, tail = True, said + tail
            if len(tail) >= _LONGEST_BEGINNING:
                break
        decoder = self._decoder()
        decoder.decode(tail)
        return begun, decoder.getstate()[0]

    def _pieces(self, ids: Ids, begun: bool) -> Iterator[bytes]:
        """The bytes of each token where it stands; `begun`: whether there is text before them."""
        for index in ids:
            said = self._said(int(index))
            if said is None:
                yield b""
            elif begun:
                yield said
            else:
                begun = True
                yield said if _is_part(said) else self._alone(int(index))

    def _alone(self, *ids: int) -> bytes:
        return self._tokenizer.decode(ids).encode()

    def _said(self, index: int) -> bytes | None:
        """The bytes of a token behind others; `None` for one that the library leaves out."""
        if index not in self._known:
            defined = index >= 0 and index not in self._special
            piece = self._tokenizer.id_to_token(index) if defined else None
            self._known[index] = None if piece is None else self._bytes(index, piece)
        return self._known[index]

    def _bytes(self, index: int, piece: str) -> bytes:
        if self._byte_level:
            spelled = all(character in self._alphabet for character in piece)
            return bytes(map(self._alphabet.__getitem__, piece)) if spelled else piece.encode()
        byte = _BYTE_PIECE.fullmatch(piece) if self._byte_pieces else None
        if byte:
            return bytes.fromhex(byte[1])
        if self._anchor is None:
            return self._alone(index)
        return self._alone(self._anchor, index).removeprefix(self._alone(self._anchor))

    def _find_anchor(self) -> int | None:
        """A token of plain text: what comes to its text with another one is that of the other."""
        for index in range(self._tokenizer.get_vocab_size()):
            piece = self._tokenizer.id_to_token(index)
            if piece and index not in self._special and not _BYTE_PIECE.fullmatch(piece):
                alone = self._alone(index)
                if alone.isalnum() and self._alone(index, index).startswith(alone):
                    return index
        return None


def _is_part(said: bytes) -> bool:
    """Whether bytes are a part of a character, which no decoder makes anything of."""
    try:
        said.decode()
    except UnicodeDecodeError:
        return True
    return False


_EACH_BYTE = "jdllm.each_byte"
"""Replaces each byte that is no UTF-8, as the library does with tokens of single bytes."""


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\N{REPLACEMENT CHARACTER}" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each)
