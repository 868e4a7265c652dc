"""Controls of logits: which ids a request may choose, and what it adds to some logits."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jdllm.arrays import padded
from jdllm.decoding.bad_words import Word, banned_words
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig
from jdllm.pallas.masked_logits import ANY, RowControl

MOST_RAISED = 512
"""Ids of one request that have a bias, or that end its text while `min_tokens` keeps the text from ending."""

_WORD = 32
_NO_IDS = 2**30 + np.arange(MOST_RAISED, dtype=np.int32)
"""Outside any vocabulary, and all different."""


class Control(NamedTuple):
    """The controls of one request: an entry of each array of `RowControl`.

    - `allowed`: uint32, a bit for each id.
    - `ids`: int32 `[MOST_RAISED]`.
    - `early`, `late`: f32 `[MOST_RAISED]`.
    - `until`: how many of the first generated tokens are early.
    - `words`: ids of words of several tokens, whose last token may not follow the others.
    """

    allowed: np.ndarray
    ids: np.ndarray
    early: np.ndarray
    late: np.ndarray
    until: int
    words: Sequence[Word] = ()


def control_of(
    sampling: SamplingParams, config: ModelConfig, limit: int, bans: Sequence[int], *, in_order: bool
) -> Control | None:
    """The controls of a request, `None` where it has none.

    Arguments:
    - `limit`, `bans`: ids from here on, and these ids, are never chosen.
    - `in_order`: whether each token is generated from all tokens before it.

    Raises `RequestError` for ids outside the vocabulary, for more ids than there is room for, for words that
    cannot be banned, and where no id is left.
    """
    if not sampling.controlled:
        return None
    bias = {i: by for i, by in (sampling.logit_bias or {}).items() if by}
    ends = _ends(sampling, config)
    _check_ids("logit_bias", list(bias), config)
    allowed, banned = _allowed(sampling, config), banned_words(sampling, config, in_order=in_order)
    words = [word for word in banned if len(word) > 1]
    allowed[[word[0] for word in banned if len(word) == 1]] = False
    # Of words of several tokens, the last ones are banned at times.
    _check_left(allowed, [*bans, *ends, *(word[-1] for word in words), config.mask_id], limit)
    late = dict.fromkeys(ends, 0.0) | bias
    if len(late) > MOST_RAISED:
        raise RequestError(
            f"logit_bias has {len(bias)} ids and min_tokens bans {len(ends)} that end the text, expected at"
            f" most {MOST_RAISED} together: give fewer"
        )
    early = late | dict.fromkeys(ends, -np.inf)
    ids = np.concatenate([np.array(list(late), np.int32), _NO_IDS[len(late) :]])
    early, late = (padded(np.array(list(x.values()), np.float32), MOST_RAISED) for x in (early, late))
    return Control(_packed(allowed), ids, early, late, sampling.min_tokens, words)


def control_columns(controls: Sequence[Control | None]) -> RowControl | None:
    """`SegmentParams.control` of some requests, whose text begins at position 0 and which have no token yet;
    `None` where none has a control."""
    size = next((len(control.allowed) for control in controls if control is not None), None)
    if size is None:
        return None
    zeros = np.zeros(MOST_RAISED, np.float32)
    free = Control(np.full(size, 2**32 - 1, np.uint32), _NO_IDS, zeros, zeros, 0)
    given = [free if control is None else control for control in controls]
    allowed, ids, early, late, until = map(np.array, zip(*(control[:-1] for control in given), strict=True))
    asks = np.array([control is not None for control in controls])
    banned = _word_columns([control.words for control in given])
    return RowControl(asks, allowed, ids, early, late, until.astype(np.int32), banned)


def _word_columns(words: Sequence[Sequence[Word]]) -> np.ndarray | None:
    """`RowControl.words` of some requests; `None` where none has a word of several tokens."""
    most = max(map(len, words))
    if not most:
        return None
    longest = max(len(word) for own in words for word in own)
    # Powers of two: other sizes are other executables.
    sizes = (max(least, 1 << (n - 1).bit_length()) for n, least in ((most, 16), (longest, 8)))
    columns = np.full((len(words), *sizes), ANY, np.int32)
    for row, own in enumerate(words):
        for at, word in enumerate(own):
            columns[row, at, -len(word) :] = word
    return columns


def _ends(sampling: SamplingParams, config: ModelConfig) -> set[int]:
    """Ids that end the text, where it may not end at once."""
    return {*config.stop_ids, *sampling.stop_token_ids} if sampling.min_tokens else set()


def _allowed(sampling: SamplingParams, config: ModelConfig) -> np.ndarray:
    """Which ids a request may choose, bool `[vocab]`."""
    if sampling.allowed_token_ids is None:
        return np.ones(config.vocab_size, bool)
    _check_ids("allowed_token_ids", sampling.allowed_token_ids, config)
    allowed = np.zeros(config.vocab_size, bool)
    allowed[list(sampling.allowed_token_ids)] = True
    return allowed


def _check_ids(name: str, ids: Sequence[int], config: ModelConfig) -> None:
    for i in ids:
        if i >= config.vocab_size:
            raise RequestError(f"{name} has {i}, outside the vocabulary (0 to {config.vocab_size - 1})")


def _check_left(allowed: np.ndarray, banned: Sequence[int | None], limit: int) -> None:
    """Raise `RequestError` where no id is left."""
    left = allowed[:limit].copy()
    left[[i for i in banned if i is not None and 0 <= i < len(left)]] = False
    if not left.any():
        raise RequestError(
            "allowed_token_ids leaves no token: each of them is the mask, is not defined by the tokenizer, or"
            " is banned by min_tokens, bad_words or logits_eos_inf; allow another id"
        )


def _packed(allowed: np.ndarray) -> np.ndarray:
    """Bools as bits of words, the lowest bit first."""
    bits = padded(allowed, -(-len(allowed) // _WORD) * _WORD)
    return np.packbits(bits, bitorder="little").view("<u4")
