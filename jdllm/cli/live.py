"""The response as it fills in, for a terminal."""

import itertools
from collections.abc import Callable, Sequence
from enum import Enum
from operator import itemgetter
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from jdllm.serving.engine import StepUpdate


class _State(Enum):
    UNSEEN = "not evaluated yet"
    PROVISIONAL = "chosen in a step that did not commit it"
    COMMITTED = "final"


class LiveResponse:
    """Committed tokens plain, provisional ones dimmed, and a shade for each position not evaluated yet.

    Arguments:
    - `decode`: ids to text.
    - `start`, `length`: the positions of the response in the sequence.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], start: int, length: int):
        self._decode = decode
        self._start = start
        self._tokens = [(_State.UNSEEN, 0)] * length

    def take(self, update: "StepUpdate") -> None:
        """Take in what one step chose and committed."""
        chosen = (update.positions.tolist(), update.provisional.tolist(), update.committed.tolist())
        for position, token, committed in zip(*chosen, strict=True):
            if position >= self._start:
                state = _State.COMMITTED if committed else _State.PROVISIONAL
                self._tokens[position - self._start] = (state, token)

    def __rich__(self) -> Text:
        text = Text()
        for state, run in itertools.groupby(self._tokens, itemgetter(0)):
            ids = [token for _, token in run]
            shown = "░" * len(ids) if state is _State.UNSEEN else self._decode(ids)
            text.append(shown, style=None if state is _State.COMMITTED else "dim")
        return text
