"""Which tokens may follow in an answer of a given form."""

import re
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from jaxtyping import UInt32
from llguidance import LLMatcher, LLParserLimits

from jdllm.errors import RequestError
from jdllm.structured.vocabulary import Vocabulary

_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_items_in_row=2_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""Work and memory of one structure. A token takes well below a second at the worst."""

_LONGEST_REASON = 300
"""Characters of what the library says."""

Mask = UInt32[np.ndarray, " words"]
"""A bit for each id, the lowest bit of a word first: which ids may follow."""


class Grammar:
    """A compiled structure.

    Arguments:
    - `grammar`: as the library writes it.
    - `vocabulary`: of the model.
    - `threads`: compute masks, which the library does without Python's lock.

    Raises `ValueError` with the library's words where the grammar is none, or nothing can be written of it.
    """

    def __init__(self, grammar: str, vocabulary: Vocabulary, threads: ThreadPoolExecutor):
        self._matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=_LIMITS)
        self._vocabulary, self._threads = vocabulary, threads
        self._first = _mask(self._matcher, vocabulary)

    def matcher(self) -> "Matcher":
        """A matcher at the beginning of an answer."""
        return Matcher(self._matcher.deep_copy(), self._first, self._vocabulary, self._threads)


class Matcher:
    """Follows one answer token by token.

    Masks are computed by threads of their own, from the moment in which a token is known.

    Arguments:
    - `matcher`: at the beginning of the answer.
    - `first`: which ids the answer may begin with.
    - `vocabulary`: of the model.
    - `threads`: compute masks.
    """

    def __init__(self, matcher: LLMatcher, first: Mask, vocabulary: Vocabulary, threads: ThreadPoolExecutor):
        self._matcher, self._vocabulary, self._threads = matcher, vocabulary, threads
        self._allowed: Future[Mask] = Future()
        self._allowed.set_result(first)
        self._late: Future[Mask] | None = None

    def ready(self, patience: float) -> bool:
        """Whether the mask of the next token is there; waits for it once, so many seconds at most."""
        if self._late is not self._allowed and not self._allowed.done():
            wait([self._allowed], patience)
            self._late = self._allowed
        return self._allowed.done()

    def allowed(self) -> Mask:
        """Which ids may follow the answer as it stands; ids that end the text where the answer is whole.

        Raises `RequestError` where no token goes on, or the structure is too much work.
        """
        return self._allowed.result()

    def take(self, tokens: Iterable[int]) -> None:
        """Go on by tokens, each of which was allowed; what ends the text is passed over."""
        own = [int(token) for token in tokens if token not in self._vocabulary.stop_ids]
        if own:
            self._allowed = self._threads.submit(self._next, own, self._allowed)

    def _next(self, tokens: list[int], before: Future[Mask]) -> Mask:
        before.result()
        try:
            if not self._matcher.consume_tokens(tokens):
                raise ValueError(self._matcher.get_error())
            return _mask(self._matcher, self._vocabulary)
        except ValueError as error:
            raise RequestError(f"structure cannot be followed any further: {told(str(error))}") from None


def told(message: str) -> str:
    """What the library says, on one line, without the text that it quotes."""
    message = re.split(r"<state>|<non-verbose/>|\n\s*\d+ \|", message)[0]
    lines = (line.strip() for line in message.splitlines())
    if message.startswith("NoExtension"):
        return "nothing can be written of it"
    said = " ".join(line for line in lines if line.strip("^ "))
    return said if len(said) <= _LONGEST_REASON else f"{said[:_LONGEST_REASON]}..."


def _mask(matcher: LLMatcher, vocabulary: Vocabulary) -> Mask:
    """Raises `ValueError` where nothing may follow."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    mask = np.zeros(-(-vocabulary.size // 32), np.uint32)
    mask.view(np.uint8)[: len(bits)] = bits[: mask.nbytes]
    ends = np.array(vocabulary.stop_ids)
    words, own = ends // 32, np.uint32(1) << (ends % 32).astype(np.uint32)
    if mask[words[0]] & own[0]:
        np.bitwise_or.at(mask, words, own)
    else:
        np.bitwise_and.at(mask, words, ~own)
    if not mask.any():
        raise ValueError("no token of the model goes on")
    return mask
