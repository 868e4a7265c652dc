"""Requests of causal models: a prompt that is evaluated in parts, then one token after another."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jdllm.checkpoints.token_text import Decode
from jdllm.decoding.causal_sampling import check_causal
from jdllm.decoding.encoded_trace import Steps
from jdllm.decoding.rules import segment_row
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.schedule import quotas
from jdllm.models.config import ModelConfig
from jdllm.serving.request import Request, of_committed
from jdllm.serving.spec import Block, RequestSpec, check_stops, checked_ids

UNKNOWN = -1
"""Stands for the tokens that are not generated yet."""


@dataclasses.dataclass(frozen=True, eq=False)
class CausalSpec(RequestSpec):
    """What a request asks of a causal model: `tokens` end with as many `UNKNOWN` as may be generated."""

    @property
    def cached(self) -> bool:
        return True

    @property
    def in_order(self) -> bool:
        return True

    @property
    def stored_rows(self) -> int:
        return len(self.tokens)


def causal_spec(
    prompt: Sequence[int] | np.ndarray,
    sampling: SamplingParams,
    config: ModelConfig,
    decode: Decode | None = None,
    bos_id: int | None = None,
) -> CausalSpec:
    """A request that appends up to `max_tokens`, or else `gen_length` tokens to `prompt`.

    Arguments:
    - `decode`: ids to text, for stop strings.
    - `bos_id`: of the tokenizer, else of the configuration: stands for an empty prompt, which asks for any
      text.

    Raises `RequestError` for an empty prompt where nothing stands for it, an id outside the vocabulary, stop
    strings without `decode`, and parameters that are for models that denoise.
    """
    check_causal(sampling)
    check_stops(sampling, config, decode)
    begins = config.bos_id if bos_id is None else bos_id
    prompt = checked_ids(prompt, config, may_be_empty=begins is not None)
    if begins is not None and not len(prompt):
        prompt = checked_ids([begins], config)
    length = min(sampling.max_tokens or sampling.gen_length, sampling.gen_length)
    tokens = np.concatenate([prompt, np.full(length, UNKNOWN, np.int32)])
    tokens.setflags(write=False)
    whole = slice(len(prompt), len(tokens))
    table = quotas(np.ones(length, np.int32))
    return CausalSpec(
        prompt=prompt,
        tokens=tokens,
        blocks=(Block(whole.start, whole.stop, length, table),),
        returned=whole,
        sampling=sampling,
        mask_id=UNKNOWN,
        shifted=False,
        stop_ids=(*config.stop_ids, *sampling.stop_token_ids),
        decode=decode,
        segment=segment_row(sampling, config, in_order=True),
    )


class CausalRequest(Request):
    """A request of a causal model as it runs.

    - `known`: how many tokens are there, prompt included.
    - `computed`: how many of the first of them are stored. All others but one have to be evaluated before
      the next token is generated; that one is evaluated with it.
    - `found`: how many were stored already when it was admitted.
    """

    def __init__(self, spec: CausalSpec, id: int = 0):
        self.known = len(spec.prompt)
        self.computed = self.found = 0
        super().__init__(spec, id)

    @property
    def decodes(self) -> bool:
        """Whether the next step generates a token from the last one alone."""
        return self.computed >= self.known - 1

    @property
    def device_stop_ids(self) -> tuple[int, ...]:
        """Ids after which the device need not go on."""
        return self.spec.stop_ids if self.sampling.early_stop else ()

    def pass_over(self, steps: int) -> None:
        """Count tokens that have not been seen: of a copy alone."""
        super().pass_over(steps)
        self.known += steps
        self.computed = self.known - 1

    def find(self, rows: int) -> None:
        """Take in that so many of the first tokens are stored already."""
        self.computed = self.found = rows

    def store(self, forwarded: np.ndarray, stored: int) -> None:
        """Take in that so many tokens are stored."""
        self.computed = stored

    def go_back(self) -> None:
        """Its stored keys are lost: they have to be computed again."""
        self.computed = 0

    def advance_many(self, positions: np.ndarray, steps: Steps) -> None:
        """Take in several tokens, up to the one that ends the text."""
        if self.sampling.stop or self.sampling.return_history:
            for step in map(Steps, *steps):
                if not self.finished and step.committed.any():
                    self.advance(*of_committed(positions, step))
            return
        step, row = np.nonzero(steps.committed)
        tokens, logprobs = steps.tokens[step, row], steps.logprobs[step, row]
        ends = np.flatnonzero(np.isin(tokens, self.device_stop_ids))
        count = int(ends[0]) + 1 if len(ends) else len(tokens)
        if count:
            positions, likeliest = positions[row[:count]], steps.likeliest[step, row][:count]
            self._commit(count, np.arange(count), positions, tokens[:count], logprobs[:count], likeliest)

    def shown(self, positions: np.ndarray, step: Steps) -> np.ndarray:
        """The token that a step generated."""
        return step.committed

    def sequences(self) -> Iterator[np.ndarray]:
        yield self.tokens[: self.known]

    def _commit(
        self,
        count: int,
        step: np.ndarray | int,
        positions: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        likeliest: np.ndarray | None,
    ) -> None:
        # Beside the new token, which is evaluated with the next one, all that is known was evaluated.
        self.known += len(positions)
        self.computed = self.known - 1
        super()._commit(count, step, positions, tokens, logprobs, likeliest)

    def _block_is_over(self) -> bool:
        return self.known == len(self.tokens) or self._text_is_over()

    def _text_is_over(self) -> bool:
        if self.tokens[self.known - 1] in self.device_stop_ids:
            return True
        return bool(self.sampling.stop) and super()._text_is_over()
