"""Scores of options: how well each of several texts fits a gap."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jdllm.decoding.likelihood import TokenScores
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig
from jdllm.scoring import Question, following, unmasked_ids
from jdllm.serving.spec import checked_ids, mask_id_of


class OptionScores(NamedTuple):
    """How well each of several options fits.

    - `logprobs`: log-likelihood of each option, natural logarithm; of a causal model with the suffix.
    - `probabilities`: their softmax, the share of each among the options.
    - `best`: index of the likeliest, of equals the first.
    """

    logprobs: list[float]
    probabilities: list[float]
    best: int


class Chain:
    """The chain rule inside a gap: each option's tokens from left to right, those to come still masked.

    Arguments:
    - `prefix`, `suffix`: ids around the gap, which has as many positions as an option has tokens.
    - `options`: ids of each.

    Options that share a beginning and a length share `questions`, whose scores `option_scores` takes.

    Raises `RequestError` where there is no option, and for one that is empty or has a mask.
    """

    def __init__(
        self,
        prefix: Sequence[int] | np.ndarray,
        options: Sequence[Sequence[int] | np.ndarray],
        suffix: Sequence[int] | np.ndarray,
        config: ModelConfig,
    ):
        mask_id = mask_id_of(config)
        before, after = (_ids_around(x, config) for x in (prefix, suffix))
        _check_options(options)
        asked: dict[tuple[int, tuple[int, ...]], list[tuple[int, int]]] = {}
        for index, option in enumerate(options):
            ids = unmasked_ids(option, f"option {index}", config).tolist()
            for place, token in enumerate(ids):
                asked.setdefault((len(ids), tuple(ids[:place])), []).append((index, token))
        self._options = len(options)
        self._owners = [[index for index, _ in tokens] for tokens in asked.values()]
        self.questions = []
        for (length, begun), tokens in asked.items():
            gap = np.array([*begun, *[mask_id] * (length - len(begun))], np.int32)
            places = np.full(len(tokens), len(before) + len(begun))
            targets = np.array([token for _, token in tokens])
            self.questions.append(Question(np.concatenate([before, gap, after]), places, targets))

    def option_scores(self, scores: Iterable[TokenScores]) -> OptionScores:
        """What the options are worth, from the scores of `questions`, in order."""
        logprobs = np.zeros(self._options)
        for owners, found in zip(self._owners, scores, strict=True):
            logprobs[owners] += found.logprob
        return shares_of(logprobs)


def in_text(
    prefix: Sequence[int] | np.ndarray,
    options: Sequence[Sequence[int] | np.ndarray],
    suffix: Sequence[int] | np.ndarray,
    config: ModelConfig,
) -> list[Question]:
    """For each option a question after the tokens of the option and of `suffix`, for a causal model; `prefix`
    is not empty.

    The log-probabilities sum up to log p(option, suffix | prefix), so the shares of the options are the
    shares of p(option | prefix, suffix). Exact.

    Raises `RequestError` if there is no option, and for an empty option.
    """
    before, after = (_ids_around(x, config) for x in (prefix, suffix))
    _check_options(options)
    return [following(before, np.concatenate([checked_ids(x, config), after])) for x in options]


def shares_of(logprobs: np.ndarray) -> OptionScores:
    """Options by their log-likelihoods, f64."""
    shares = np.exp(logprobs - logprobs.max())
    return OptionScores(logprobs.tolist(), (shares / shares.sum()).tolist(), int(logprobs.argmax()))


def _ids_around(ids: Sequence[int] | np.ndarray, config: ModelConfig) -> np.ndarray:
    return checked_ids(ids, config) if len(ids) else np.empty(0, np.int32)


def _check_options(options: Sequence[Sequence[int] | np.ndarray]) -> None:
    if not options:
        raise RequestError("there are no options: give at least one")
    for index, option in enumerate(options):
        if not len(option):
            raise RequestError(f"option {index} is empty: give at least one token")
