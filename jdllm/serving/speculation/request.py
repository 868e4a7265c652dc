"""Requests of models that verify their own drafts: a causal request that takes several tokens at once."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jdllm.checkpoints.token_text import Decode
from jdllm.decoding.block_sampling import check_drafting
from jdllm.decoding.encoded_trace import Steps
from jdllm.decoding.rules import segment_row
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.schedule import StepTable, quotas
from jdllm.errors import RequestError
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.config import ModelConfig
from jdllm.serving.causal.request import CausalRequest, CausalSpec, causal_spec
from jdllm.serving.request import of_committed


@dataclasses.dataclass(frozen=True, eq=False)
class SpeculativeSpec(CausalSpec):
    """What a request asks whose model verifies its own drafts.

    - `block_length`: rows of a draft, of which the first is known. The last drafts may reach beyond the text.
    - `content`: what its stored rows depend on beside their tokens.
    """

    block_length: int
    content: bytes = b""

    @property
    def positions(self) -> int:
        return self.stored_rows

    @property
    def stored_rows(self) -> int:
        return len(self.tokens) + self.block_length - 1


def speculative_spec(
    prompt: Sequence[int] | np.ndarray,
    sampling: SamplingParams,
    config: ModelConfig,
    block_length: int,
    decode: Decode | None = None,
    bos_id: int | None = None,
    content: bytes = b"",
) -> SpeculativeSpec:
    """A request like one of `causal_spec`, of which each round drafts a block and verifies the draft.

    Arguments:
    - `prompt`, `decode`, `bos_id`: of `causal_spec`: ids, ids to text, and what stands for an empty prompt.
    - `sampling`: without a `generation_mode`. Its `transfer` says which masks an evaluation of a draft fills:
      by default all.
    - `config`: the model as a causal one.
    - `block_length`: rows of a draft unless the request says how many.
    - `content`: what stored rows depend on beside their tokens.

    Raises `RequestError` as `causal_spec` does, for parameters that drafts have no use for, and for a block
    of more rows than a page has.
    """
    check_drafting(sampling)
    length = sampling.block_length or block_length
    if length > PAGE_ROWS:
        raise RequestError(f"block_length is {length}, expected at most {PAGE_ROWS}")
    plain = sampling.changed(block_length=None, transfer="schedule")
    spec = causal_spec(prompt, plain, config, decode, bos_id)
    # Verified tokens are those of the other way to generate, which bans nothing.
    drafted = sampling.changed(undefined_tokens=sampling.undefined_tokens or "official")
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    fields |= {"sampling": drafted, "segment": segment_row(drafted, config)}
    return SpeculativeSpec(**fields, block_length=length, content=content)


def as_causal(config: ModelConfig) -> ModelConfig:
    """A block model as one that generates one token after another."""
    return dataclasses.replace(config, attention="causal", block_length=None, causal_context=False)


class SpeculativeRequest(CausalRequest):
    """A request whose model verifies its own drafts, as it runs. An evaluation that drafts is a step that
    commits nothing."""

    def __init__(self, spec: SpeculativeSpec, id: int = 0):
        self.block_length = spec.block_length
        self._passed = 0
        super().__init__(spec, id)
        self.content = spec.content

    def table_left(self, capacity: int) -> StepTable:
        """Each evaluation of a draft may fill all masks."""
        return quotas(np.full(capacity, self.block_length, np.int32))

    def pass_by(self, steps: int) -> None:
        """Take in that so many of the steps that are taken in next are those of others."""
        self._passed = steps

    def advance(
        self,
        positions: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        likeliest: np.ndarray | None = None,
    ) -> None:
        """Take in an evaluation: the tokens that it verified, or nothing where it drafted."""
        if self._passed:
            self._passed -= 1
            return
        super().advance(positions, tokens, logprobs, likeliest)

    def advance_many(self, positions: np.ndarray, steps: Steps) -> None:
        """Take in the evaluations of a part; a part of a prompt is none."""
        for step in map(Steps, *steps) if len(positions) else ():
            self.advance(*of_committed(positions, step))
