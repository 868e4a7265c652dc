"""Answers of a given form by models that denoise: the frontier, which is the first mask, moves to the right.

What stands to the left of a token is all that a grammar knows. So a step commits the first mask of the
answer, which sees the masks behind it.
"""

import numpy as np

from jdllm.errors import RequestError
from jdllm.serving.request import Request
from jdllm.serving.spec import FrontierSpec


class FrontierRequest(Request):
    """A request whose steps commit the first mask of the answer, and no other."""

    def __init__(self, spec: FrontierSpec, id: int = 0):
        if spec.grammar is None:
            raise RequestError("structure needs a compiled grammar in the request: ask LLM.spec for one")
        self.matcher = spec.grammar.matcher()
        super().__init__(spec, id)

    @property
    def steps_left(self) -> int:
        """One: the host follows the grammar between two steps."""
        return min(1, super().steps_left)

    def candidates(self) -> np.ndarray:
        return self.masked()[:1]

    def go_back(self) -> None:
        super().go_back()
        assert self.spec.grammar is not None
        self.matcher = self.spec.grammar.matcher()
        answer = self.tokens[self.blocks[0].start :]
        self.matcher.take(answer[: np.argmax(answer == self.mask_id)])

    def _commit(
        self,
        count: int,
        step: np.ndarray | int,
        positions: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        likeliest: np.ndarray | None,
    ) -> None:
        assert self.matcher is not None
        self.matcher.take(tokens)
        super()._commit(count, step, positions, tokens, logprobs, likeliest)

    def _block_is_over(self) -> bool:
        return super()._block_is_over() or self._text_is_over()
