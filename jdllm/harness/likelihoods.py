"""Likelihoods for lm-eval, of models that denoise and of causal ones: nothing here needs lm-eval."""

import abc
import math
from collections.abc import Sequence
from typing import Any

from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import ConfigError
from jdllm.harness.translation import (
    ModelArguments,
    Pair,
    behind,
    encode_pair,
    fitted,
    rolling_windows,
    windows,
)
from jdllm.llm import LLM
from jdllm.serving.spec import mask_id_of


class Likelihoods(abc.ABC):
    """Scores pairs of texts.

    Arguments:
    - `llm`, `tokenizer`: the model, and what reads texts for it, special tokens included.
    - `asked`: the arguments that concern likelihoods.
    - `max_length`: positions of a sequence.
    """

    def __init__(self, llm: LLM, tokenizer: Tokenizer, asked: ModelArguments, max_length: int):
        self._llm, self._tokenizer, self._asked, self._max_length = llm, tokenizer, asked, max_length

    @abc.abstractmethod
    def pair(self, context: str, continuation: str) -> Pair:
        """The ids of a context and of what continues it."""

    @abc.abstractmethod
    def fitted(self, pair: Pair) -> Pair:
        """`pair` without the beginning of a prompt that is too long."""

    @abc.abstractmethod
    def windows(self, text: str) -> list[Pair]:
        """A text in parts whose likelihoods multiply to its own."""

    @abc.abstractmethod
    def log_likelihoods(self, pairs: Sequence[Pair], *, progress: bool) -> list[float]:
        """log p(answer | prompt) of each pair, natural logarithm."""

    @abc.abstractmethod
    def with_greedy(self, pairs: Sequence[Pair], *, progress: bool) -> list[tuple[float, bool]]:
        """The same, and whether each answer is the greedy one; none is where that is not to be checked."""

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, parse_special=True)

    @property
    def _first(self) -> int:
        """The id before a text without a context, where the model needs one."""
        ids = self._tokenizer.bos_id, self._llm.config.eos_id
        found = next((i for i in ids if i is not None), None)
        if found is None:
            raise ConfigError("a text without a context is scored behind a BOS or EOS id: the model has none")
        return found


class Estimated(Likelihoods):
    """Of a model that denoises: stratified Monte Carlo estimates of its bound, as in LLaDA's evaluation.

    Raises `RequestError` for a model without a mask.
    """

    def __init__(self, llm: LLM, tokenizer: Tokenizer, asked: ModelArguments, max_length: int):
        super().__init__(llm, tokenizer, asked, max_length)
        self._mask_id = mask_id_of(llm.config)

    def pair(self, context: str, continuation: str) -> Pair:
        return encode_pair(self._encode, context, continuation)

    def fitted(self, pair: Pair) -> Pair:
        return fitted(pair, self._max_length)

    def windows(self, text: str) -> list[Pair]:
        return windows(self._encode(text), self._max_length)

    def log_likelihoods(self, pairs: Sequence[Pair], *, progress: bool) -> list[float]:
        found = self._llm.likelihoods(pairs, **self._settings, progress=progress)
        return [one.log_likelihood for one in found]

    def with_greedy(self, pairs: Sequence[Pair], *, progress: bool) -> list[tuple[float, bool]]:
        greedy = self._greedy(pairs, progress) if self._asked.is_check_greedy else [False] * len(pairs)
        return list(zip(self.log_likelihoods(pairs, progress=progress), greedy, strict=True))

    @property
    def _settings(self) -> dict[str, Any]:
        """How likelihoods are estimated."""
        return {
            "mc_num": self._asked.mc_num,
            "batch_size": self._asked.mc_batch_size,
            "cfg_scale": self._asked.sampling.get("cfg_scale", 0.0),
            "seed": self._asked.sampling.get("seed", 0),
        }

    def _greedy(self, pairs: Sequence[Pair], progress: bool) -> list[bool]:
        """Whether each answer is what the model fills its place with, the surest token first.

        Source: suffix_greedy_prediction of eval_llada.py of ML-GSAI/LLaDA.
        """
        sampling = SamplingParams(cfg_scale=self._asked.sampling.get("cfg_scale", 0.0))
        masked = [[*pair.prompt, *[self._mask_id] * len(pair.answer)] for pair in pairs]
        outputs = self._llm.infill(token_ids=masked, sampling=sampling, progress=progress)
        return [
            output.token_ids[len(pair.prompt) :] == pair.answer
            for output, pair in zip(outputs, pairs, strict=True)
        ]


class ByBlocks(Estimated):
    """Of a block model: estimates block by block.

    Where logits are shifted, a text without a context is behind the tokenizer's BOS or else the model's EOS.
    """

    def pair(self, context: str, continuation: str) -> Pair:
        pair = super().pair(context, continuation)
        return behind(self._first, pair.answer) if self._needs_token and not pair.prompt else pair

    def fitted(self, pair: Pair) -> Pair:
        return fitted(pair, self._max_length, least=int(self._needs_token))

    def windows(self, text: str) -> list[Pair]:
        if not self._needs_token:
            return super().windows(text)
        ids = self._tokenizer.encode(text, parse_special=True, begins=False)
        return rolling_windows(ids, self._first, max(self._max_length - 1, 1))

    @property
    def _needs_token(self) -> bool:
        return self._llm.config.logits_shift

    @property
    def _settings(self) -> dict[str, Any]:
        return super()._settings | {"block_length": self._asked.sampling.get("block_length")}

    def _greedy(self, pairs: Sequence[Pair], progress: bool) -> list[bool]:
        """Whether each answer is what the model generates, the surest token of a block first."""
        length = self._asked.sampling.get("block_length")
        sampling = [
            SamplingParams(gen_length=len(pair.answer), block_length=length, early_stop=False)
            for pair in pairs
        ]
        prompts = [pair.prompt for pair in pairs]
        outputs = self._llm.generate(prompt_token_ids=prompts, sampling=sampling, progress=progress)
        return [output.token_ids == pair.answer for output, pair in zip(outputs, pairs, strict=True)]


class Exact(Likelihoods):
    """Of a causal model and of those with a causal context: exact, by one evaluation of each pair, which also
    finds the greedy tokens.

    Pairs and windows follow lm-eval's own causal models: a text without a context is behind the
    tokenizer's BOS or else the model's EOS, and the last token of a pair needs no position. Of a whole text
    its own tokens are scored alone, never a BOS that the tokenizer puts before it.

    Raises `ConfigError` for arguments of an estimate.
    """

    def __init__(self, llm: LLM, tokenizer: Tokenizer, asked: ModelArguments, max_length: int):
        super().__init__(llm, tokenizer, asked, max_length)
        for name in ("mc_num", "mc_batch_size"):
            if getattr(asked, name) != getattr(ModelArguments, name):
                raise ConfigError(
                    f"model_args has {name!r}, which is for models that denoise: a causal model masks nothing"
                    " to score an answer"
                )

    def pair(self, context: str, continuation: str) -> Pair:
        pair = encode_pair(self._encode, context, continuation)
        return pair if pair.prompt else behind(self._first, pair.answer)

    def fitted(self, pair: Pair) -> Pair:
        return fitted(pair, self._max_length + 1, least=1)

    def windows(self, text: str) -> list[Pair]:
        ids = self._tokenizer.encode(text, parse_special=True, begins=False)
        return rolling_windows(ids, self._first, self._max_length)

    def log_likelihoods(self, pairs: Sequence[Pair], *, progress: bool) -> list[float]:
        return [one.log_likelihood for one in self._llm.likelihoods(pairs, progress=progress)]

    def with_greedy(self, pairs: Sequence[Pair], *, progress: bool) -> list[tuple[float, bool]]:
        scored = self._llm.token_logprobs(pairs, progress=progress)
        return [
            (
                math.fsum(token.logprob for token in tokens),
                self._asked.is_check_greedy and [token.best for token in tokens] == pair.answer,
            )
            for tokens, pair in zip(scored, pairs, strict=True)
        ]


def likelihoods_of(llm: LLM, tokenizer: Tokenizer, asked: ModelArguments, max_length: int) -> Likelihoods:
    """How a model's likelihoods are found; raises as `Estimated` and `Exact` do."""
    config = llm.config
    denoising = ByBlocks if config.attention == "block_causal" else Estimated
    kind = Exact if config.scored_in_order else denoising
    return kind(llm, tokenizer, asked, max_length)
