"""Server-sent events, however their bytes are cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.bench.events import Event, EventParser

STREAM = (
    ": a comment\n"
    'data: {"text": "Größe 漢字 🙂"}\n'
    "\n"
    "event: step\r\n"
    "id: 3\r\n"
    "data:first\r\n"
    "data:  second: line\r\n"
    "\r\n"
    "event: without data\n"
    "\n"
    "data\n"
    "\n"
    "data: [DONE]\n\n"
).encode()
EVENTS = [
    Event("message", '{"text": "Größe 漢字 🙂"}'),
    Event("step", "first\n second: line"),
    Event("message", ""),
    Event("message", "[DONE]"),
]


def parsed(*pieces: bytes) -> list[Event]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_events_in_one_piece():
    assert parsed(STREAM) == EVENTS


def test_events_byte_by_byte():
    assert parsed(*(bytes([byte]) for byte in STREAM)) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12).map(sorted))
def test_events_in_any_pieces(cuts: list[int]):
    places = [0, *cuts, len(STREAM)]
    assert parsed(*(STREAM[a:b] for a, b in itertools.pairwise(places))) == EVENTS


@pytest.mark.parametrize("rest", [b"data: cut", b"data: cut\n"])
def test_an_event_that_was_cut_off_is_none(rest: bytes):
    assert parsed(STREAM, rest) == EVENTS


def test_an_event_is_there_with_its_last_byte():
    parser = EventParser()
    assert list(parser.feed(b"data: a\n")) == []
    assert list(parser.feed(b"\ndata: b")) == [Event("message", "a")]
