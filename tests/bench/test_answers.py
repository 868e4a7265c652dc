"""Answers in one piece, as OpenAI's chunks, and as denoising steps."""

import json
from typing import Any

import pytest

from jdllm.bench.answers import (
    Answer,
    BadAnswer,
    DenoiseStream,
    Stream,
    TextStream,
    error_message,
    read_whole,
)
from jdllm.bench.events import Event

USAGE = {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13, "forward_evaluations": 6}
DONE = Event("message", "[DONE]")


def chunk(told: int, *choices: dict[str, Any]) -> Event:
    return Event("message", json.dumps({"choices": choices, "usage": USAGE | {"completion_tokens": told}}))


def named(name: str, **data: Any) -> Event:
    return Event(name, json.dumps(data))


def read(reader: Stream, *events: Event) -> Answer:
    """The answer of a stream whose events come a second apart."""
    for now, event in enumerate(events):
        reader.take(event, float(now))
    return reader.answer()


def test_text_and_block_are_told_apart():
    events = [
        chunk(0, {"delta": {"role": "assistant", "content": ""}}),
        chunk(1, {"delta": {"content": "a"}}),
        chunk(3, {"delta": {"content": "b"}}),
        chunk(4, {"text": "c"}),
        chunk(8, {"text": "d", "finish_reason": "length"}),
        Event("message", json.dumps({"choices": [], "usage": USAGE})),
        DONE,
    ]
    assert read(TextStream(4), *events) == Answer(5, 8, "length", 6, first_text=1.0, first_block=3.0)
    assert read(TextStream(None), *events) == Answer(5, 8, "length", 6, first_text=1.0, first_block=None)


def test_forward_evaluations_of_the_choice_come_first():
    assert read(TextStream(None), chunk(8, {"text": "a", "nfe": 7}), DONE).nfe == 7


def test_a_block_is_there_when_its_last_position_is_committed():
    reader = DenoiseStream()
    answer = read(
        reader,
        named("start", index=0, start=3, stop=7, blocks=[[3, 5], [5, 7]]),
        named("step", positions=[3, 4], committed=[False, False]),
        named("step", positions=[3, 4], committed=[False, True]),
        named("step", positions=[3, 5], committed=[False, True]),
        named("step", positions=[3], committed=[True]),
        named("step", positions=[6], committed=[True]),
        named("end", finish_reason="stop", nfe=5, usage=USAGE),
        DONE,
    )
    assert answer == Answer(5, 8, "stop", 5, first_text=2.0, first_block=4.0)


def test_an_answer_in_one_piece():
    body = {"choices": [{"text": "x", "finish_reason": "length", "nfe": 6}], "usage": USAGE}
    assert read_whole(json.dumps(body)) == Answer(5, 8, "length", 6)


@pytest.mark.parametrize(
    ("reader", "events", "message"),
    [
        (TextStream(4), [chunk(8, {"text": "a"})], r"without \[DONE\]"),
        (TextStream(4), [Event("message", '{"choices": []}'), DONE], "no usage"),
        (TextStream(4), [Event("message", "{"), DONE], "not readable as JSON"),
        (TextStream(4), [Event("message", "[1]"), DONE], "is a list"),
        (TextStream(4), [named("message", error={"message": "out of\npages"}), DONE], "^out of pages$"),
        (DenoiseStream(), [named("end", usage=USAGE)], r"without \[DONE\]"),
        (DenoiseStream(), [DONE], "no event 'end'"),
        (DenoiseStream(), [named("error", error={"message": "a step failed"}), DONE], "^a step failed$"),
    ],
)
def test_what_does_not_count_as_an_answer(reader: Stream, events: list[Event], message: str):
    with pytest.raises(BadAnswer, match=message):
        read(reader, *events)


@pytest.mark.parametrize(("body", "message"), [('{"usage": {}}', "no choices"), ("", "not readable")])
def test_what_is_no_answer_in_one_piece(body: str, message: str):
    with pytest.raises(BadAnswer, match=message):
        read_whole(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "flat"}', '{"error": "flat"}'),
        (b"Internal\nServer Error", "Internal Server Error"),
        (b"", ""),
        (b"\xff" * 500, "\N{REPLACEMENT CHARACTER}" * 200),
    ],
)
def test_errors_in_any_shape(body: bytes, message: str):
    assert error_message(body) == message
