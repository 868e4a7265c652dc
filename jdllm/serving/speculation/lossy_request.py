"""Requests of block models whose drafts the model may verify: a block request that evaluates up to twice a
step."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jdllm.checkpoints.token_text import Decode
from jdllm.decoding.encoded_trace import Steps
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig
from jdllm.serving.blocks.request import BlockRequest, BlockSpec, block_spec
from jdllm.serving.request import of_committed


@dataclasses.dataclass(frozen=True, eq=False)
class LossySpec(BlockSpec):
    """What a request asks of a block model whose drafts may be verified."""

    @property
    def seen_length(self) -> int:
        return 1 if self.sampling.effective("causal_rows") else self.block_length


def lossy_spec(
    prompt: Sequence[int] | np.ndarray,
    sampling: SamplingParams,
    config: ModelConfig,
    decode: Decode | None = None,
) -> LossySpec:
    """A request like one of `block_spec`, whose steps may verify what they draft.

    Arguments:
    - `prompt`, `sampling`, `decode`: of `block_spec`.
    - `config`: the model.

    Raises `RequestError` as `block_spec` does, for parameters that such steps have no use for, and for a
    model with shifted logits.
    """
    if config.logits_shift:
        raise RequestError(
            "transfer 'lossy_speculation' is for models whose rows predict their own token; those of"
            f" {config.family} models predict the token behind them: choose another transfer"
        )
    spec = block_spec(prompt, sampling, config, decode)
    return LossySpec(**{field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)})


class LossyRequest(BlockRequest):
    """A request whose drafts may be verified, as it runs.

    An evaluation whose draft is verified is a step that commits nothing, and none of the block's steps: those
    say what draft and verification may commit together.

    - `verifies`: whether the last draft was verified.
    """

    verifies = False

    def __init__(self, spec: LossySpec, id: int = 0):
        self._passes = self._drafts = False
        super().__init__(spec, id)

    def find_verdict(self, *, verified: bool, beside: bool) -> None:
        """Take in whether the draft of the part that is taken in next was verified.

        Arguments:
        - `beside`: whether any draft of the part was. Then the part has two steps.
        """
        self.verifies = self._drafts = verified
        self._passes = beside and not verified

    def shown(self, positions: np.ndarray, step: Steps) -> np.ndarray:
        """The rows that were masked before the step; none of the first step of others."""
        return super().shown(positions, step) & (not self._passes)

    def advance(
        self,
        positions: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        likeliest: np.ndarray | None = None,
    ) -> None:
        """Take in an evaluation: what it commits, or nothing where it drafted what is verified."""
        if self._passes:
            self._passes = False
            return
        if self._drafts:
            self._drafts = False
            self.block_step -= 1
        super().advance(positions, tokens, logprobs, likeliest)

    def advance_many(self, positions: np.ndarray, steps: Steps) -> None:
        """Take in the evaluations of a part; a part that stores blocks is none."""
        for step in map(Steps, *steps) if len(positions) else ():
            self.advance(*of_committed(positions, step))
