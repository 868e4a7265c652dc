"""What a terminal shows of a response as it fills in."""

import io

import numpy as np
from rich.console import Console

from jdllm.checkpoints.token_text import Ids
from jdllm.cli.live import LiveResponse
from jdllm.serving.updates import StepUpdate


def update(positions: list[int], tokens: str, committed: list[bool]) -> StepUpdate:
    ids = np.array([ord(t) for t in tokens], np.int32)
    return StepUpdate(
        0, 0, np.array(positions, np.int32), ids, np.array(committed), np.zeros(len(ids), np.float32)
    )


def decode(ids: Ids, before: Ids = (), *, final: bool = True) -> str:
    return "".join(map(chr, ids))


def response(length: int) -> LiveResponse:
    return LiveResponse(decode, length)


def screen(shown: LiveResponse, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_committed_and_provisional_are_kept_apart():
    shown = response(5)
    shown.take(update([2, 3, 4], "abc", [False, True, False]))
    shown.take(update([2, 4], "AC", [True, False]))
    text = shown.text()
    assert text.plain == "AbC░░"
    styles = [text.get_style_at_offset(Console(), i).dim for i in range(5)]
    assert styles == [None, None, True, True, True]


def test_nothing_is_cut_off_a_text_that_fits():
    assert screen(response(25), 10, 4) == ["░" * 10, "░" * 10, "░" * 5]


def test_the_screen_follows_a_text_taller_than_it():
    shown = response(100)
    assert screen(shown, 10, 4) == ["░" * 10] * 4
    letters = "".join(chr(ord("a") + i // 10) for i in range(60))
    shown.take(update([*range(7, 67)], letters, [True] * 60))
    assert screen(shown, 10, 4) == ["c" * 10, "d" * 10, "e" * 10, "f" * 10]
    shown.take(update([*range(67, 107)], "." * 40, [True] * 40))
    assert screen(shown, 10, 4) == ["." * 10] * 4


def test_a_note_is_below_the_response():
    shown = response(100)
    shown.note("compiling")
    assert screen(shown, 10, 4) == ["░" * 10] * 3 + ["compiling"]
    shown.note(None)
    assert screen(shown, 10, 4) == ["░" * 10] * 4
