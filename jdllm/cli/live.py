"""The response as it fills in, for a terminal."""

import itertools
from collections.abc import Iterable
from enum import Enum
from operator import itemgetter
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text

if TYPE_CHECKING:
    from jdllm.checkpoints.token_text import Decode
    from jdllm.serving.updates import StepUpdate


class _State(Enum):
    UNSEEN = "not evaluated yet"
    PROVISIONAL = "chosen in a step that did not commit it"
    COMMITTED = "final"


_Token = tuple[_State, int]


class LiveResponse:
    """Committed tokens plain, provisional ones dimmed, and a shade for each position not evaluated yet.

    Of a text taller than the screen, the part is shown that ends with what was evaluated last.

    Arguments:
    - `decode`: ids to text, behind others.
    - `length`: positions of the response.
    """

    def __init__(self, decode: "Decode", length: int):
        self._decode = decode
        self._start: int | None = None
        self._note = ""
        self._tokens: list[_Token] = [(_State.UNSEEN, 0)] * length

    def note(self, message: str | None) -> None:
        """Show a message below the response, or none."""
        self._note = message or ""

    def take(self, update: "StepUpdate") -> None:
        """Take in what one step chose and committed."""
        if self._start is None:  # the first step evaluates the response from its first position on
            self._start = int(update.positions.min())
        chosen = (update.positions.tolist(), update.provisional.tolist(), update.committed.tolist())
        for position, token, committed in zip(*chosen, strict=True):
            state = _State.COMMITTED if committed else _State.PROVISIONAL
            self._tokens[position - self._start] = (state, token)

    def __rich__(self) -> "_Tail":
        evaluated = [i for i, (state, _) in enumerate(self._tokens) if state is not _State.UNSEEN]
        front = evaluated[-1] + 1 if evaluated else 0
        return _Tail(self.text(self._tokens), self.text(self._tokens[:front]), self._note)

    def text(self, tokens: Iterable[_Token] | None = None) -> Text:
        """The response, or some tokens of it."""
        text, before = Text(), []
        for state, run in itertools.groupby(self._tokens if tokens is None else tokens, itemgetter(0)):
            ids = [token for _, token in run]
            shown = "░" * len(ids) if state is _State.UNSEEN else self._decode(ids, before)
            before += ids
            text.append(shown, style=None if state is _State.COMMITTED else "dim")
        return text


class _Tail:
    """As many lines of `whole` as the screen has, down to where `front` ends, and a note below them."""

    def __init__(self, whole: Text, front: Text, note: str):
        self._whole, self._front, self._note = whole, front, note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        below = console.render_lines(Text(self._note), options, pad=False) if self._note else []
        height = console.height - len(below)
        lines = console.render_lines(self._whole, options, pad=False)
        bottom = max(len(console.render_lines(self._front, options)), height)
        for i, line in enumerate([*lines[:bottom][-height:], *below]):
            yield from [Segment.line()] * (i > 0)
            yield from line
