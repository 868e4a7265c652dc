"""Words that a text may not have, as token ids."""

from collections.abc import Callable, Sequence

from jdllm.arguments import shortened
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig

MOST_WORDS = 256
"""Words of several tokens of one request."""

LONGEST_WORD = 32
"""Tokens of one word."""

Word = tuple[int, ...]


def spelled(
    sampling: SamplingParams,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> SamplingParams:
    """The same request with the ids of its words in place of their texts: of each text as it stands, and
    behind a space.

    Arguments:
    - `encode`: a part of a text to ids, without special tokens.
    - `decode`: ids to text.

    Raises `RequestError` for a text that has no tokens or that its tokens do not spell.
    """
    if not any(isinstance(word, str) for word in sampling.bad_words):
        return sampling
    words: dict[Word, None] = {}
    for word in sampling.bad_words:
        if not isinstance(word, str):
            words[word] = None
            continue
        for text in (word, f" {word.lstrip(' ')}") if word.strip() else (word,):
            ids = tuple(encode(text))
            if not ids or word.strip(" ") not in decode(ids):
                raise RequestError(
                    f"bad_words has {shortened(word)}, which the tokenizer cannot write: leave the word out,"
                    " or give token ids"
                )
            words[ids] = None
    return sampling.changed(bad_words=tuple(words))


def banned_words(sampling: SamplingParams, config: ModelConfig, *, in_order: bool) -> list[Word]:
    """The words of a request as ids, those of one token first, without words that hold one of these.

    Arguments:
    - `in_order`: whether each token is generated from all tokens before it; else words have one token.

    Raises `RequestError` for texts, for ids outside the vocabulary, and for words that are too many or too
    long.
    """
    found: list[Word] = []
    for word in sampling.bad_words:
        if isinstance(word, str):
            raise RequestError(
                f"bad_words has the text {shortened(word)}, which needs tokenizer files (tokenizer.json), and"
                " this model has none: give token ids"
            )
        found.append(word)
        outside = next((i for i in word if i >= config.vocab_size), None)
        if outside is not None:
            raise RequestError(
                f"bad_words has {outside}, outside the vocabulary (0 to {config.vocab_size - 1})"
            )
    single = {word[0] for word in found if len(word) == 1}
    several = [word for word in dict.fromkeys(found) if len(word) > 1 and not single.intersection(word)]
    if several and not in_order:
        raise RequestError(
            f"bad_words has a word of {len(several[0])} tokens {several[0]}: only requests that generate one"
            " token after another, of causal models, ban such words; give words of one token"
        )
    longest = max(map(len, several), default=0)
    if len(several) > MOST_WORDS or longest > LONGEST_WORD:
        raise RequestError(
            f"bad_words has {len(several)} words of several tokens, the longest of {longest}: expected at"
            f" most {MOST_WORDS} of at most {LONGEST_WORD}"
        )
    return [*((id,) for id in sorted(single)), *several]
