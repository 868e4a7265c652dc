"""Answers of a given form by models that denoise: the frontier, which is the first mask, moves to the right.

What stands to the left of a token is all that a grammar knows. So a step commits the first mask of the
answer, which sees the masks behind it.
"""

import numpy as np

from jdllm.serving.request import Request


class FrontierRequest(Request):
    """A request whose steps commit the first mask of the answer, and no other."""

    @property
    def steps_left(self) -> int:
        """One: the host follows the grammar between two steps."""
        return min(1, super().steps_left)

    def candidates(self) -> np.ndarray:
        return self.masked()[:1]

    def go_back(self) -> None:
        super().go_back()
        self.matcher = self.spec.matcher()
        assert self.matcher is not None  # a frontier has a form
        answer = self.tokens[self.blocks[0].start :]
        self.matcher.take(answer[: np.argmax(answer == self.mask_id)])

    def _block_is_over(self) -> bool:
        return super()._block_is_over() or self._text_is_over()
