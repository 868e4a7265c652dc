"""Where a text that grows at its end first has one of some strings."""

from collections.abc import Sequence

import numpy as np

from jdllm.checkpoints.token_text import Decode


class StopStrings:
    """Looks for the end of a result; reads each token once.

    Arguments:
    - `strings`: any of them ends the text; each lies within the result as a whole.
    - `decode`: ids to text.
    """

    def __init__(self, strings: Sequence[str], decode: Decode):
        self._strings, self._decode = strings, decode
        self._longest = max(map(len, strings))
        self._begin()

    def _begin(self) -> None:
        self._read, self._last, self._found = 0, "", False

    def completed_at(self, tokens: np.ndarray, start: int, stop: int) -> int | None:
        """The index in `tokens[start:stop]`, a result that may go on, of the id that completes a string.

        - `tokens`: int32, the whole sequence: the result may begin inside a word or a character.
        """
        if stop - start < self._read:  # the request went back
            self._begin()
        while not self._found and self._read < stop - start:
            at = start + self._read
            text = self._last + self._decode(tokens[at : at + 1], tokens[:at], final=False)
            self._found = any(string in text for string in self._strings)
            self._last = text[max(0, len(text) - self._longest + 1) :]
            self._read += 1
        return self._read - 1 if self._found else None
