from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.api.text_stream import TextStream
from jdllm.checkpoints.tokenizer import Tokenizer, load_tokenizer
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo import checkpoint_path
from jdllm.models.hf_config import config_from_hf
from jdllm.outputs import request_output
from jdllm.serving.request import Request
from jdllm.serving.spec import RequestSpec, generation_spec
from jdllm.serving.updates import StepUpdate

PROMPT = [10, 11, 12]
CONFIG = config_from_hf(checkpoint_path())


def _tokenizer() -> Tokenizer:
    found = load_tokenizer(checkpoint_path())
    assert found is not None
    return found


TOKENIZER = _tokenizer()


def spec_of(length: int, **options: Any) -> RequestSpec:
    sampling = SamplingParams(gen_length=length, **options)
    return generation_spec(PROMPT, sampling, CONFIG, decode=TOKENIZER.decode)


def run(spec: RequestSpec, ids: list[int], order: list[list[int]]) -> tuple[str, list[str], list[int], str]:
    """The final text, the parts that a stream tells, the tokens that these name, and the text at the end."""
    stream, state = TextStream(spec, TOKENIZER), Request(spec)
    parts, told = [], []
    for step, places in enumerate(order):
        positions = np.array(places) + len(PROMPT)
        tokens = np.array([ids[place] for place in places], np.int32)
        logprobs = -np.arange(1, len(places) + 1, dtype=np.float32)
        update = StepUpdate(0, step, positions, tokens, np.ones(len(places), bool), logprobs)
        state.advance(positions, tokens, logprobs)
        delta = stream.take(update)
        parts.append(delta.text)
        told += delta.tokens[0]
        if state.finished:
            break
    sample = request_output(None, 0, [state], TOKENIZER.decode).outputs[0]
    last = stream.finish(sample.text or "", len(sample.token_ids))
    return sample.text or "", [*parts, last.text], [*told, *last.tokens[0]], stream.text


@st.composite
def denoisings(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Bytes of a text with characters of several bytes, and the order in which they are committed."""
    text = draw(st.text(alphabet="ab1+=é€😀", min_size=1, max_size=12))
    ids = TOKENIZER.encode(text)
    left, order = draw(st.permutations(range(len(ids)))), []
    while left:
        size = draw(st.integers(1, len(left)))
        order.append(sorted(left[:size]))
        left = left[size:]
    return ids, order


@given(denoisings(), st.lists(st.text(alphabet="ab1+=é€", min_size=1, max_size=3), max_size=2))
def test_the_parts_of_a_stream_are_the_text(denoising, stop):
    ids, order = denoising
    text, parts, told, whole = run(spec_of(len(ids), stop=stop), ids, order)
    assert "".join(parts) == whole == text
    assert told == ids[: len(told)]
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


def test_a_gap_holds_back_what_is_behind_it():
    ids = TOKENIZER.encode("abcd")
    _, parts, _, _ = run(spec_of(4), ids, [[0], [2, 3], [1]])
    assert parts == ["a", "", "bcd", ""]


def test_a_character_waits_for_its_last_byte():
    ids = TOKENIZER.encode("€1")
    _, parts, _, _ = run(spec_of(len(ids)), ids, [[place] for place in range(len(ids))])
    assert parts == ["", "", "€", "1", ""]


@pytest.mark.parametrize(("text", "expected"), [("ab", ["a", "", "b"]), ("a=b", ["a", "", ""])])
def test_what_may_be_a_stop_string_waits(text, expected):
    ids = [*TOKENIZER.encode("a"), *TOKENIZER.encode(text[1:])]
    stop = "=b" if "=" in text else "bc"
    _, parts, _, _ = run(spec_of(len(ids), stop=stop), ids, [[place] for place in range(len(ids))])
    assert parts[: len(expected) - 1] == expected[:-1]
    assert "".join(parts) == text.split("=b")[0]


def test_tokens_come_with_their_log_probabilities_and_steps():
    ids = TOKENIZER.encode("abc")
    stream = TextStream(spec_of(3), TOKENIZER)
    first = StepUpdate(
        0,
        0,
        np.array([4, 3]),
        np.array([ids[1], ids[0]]),
        np.array([True, True]),
        np.array([-2, -1], np.float32),
    )
    assert stream.take(first).tokens == (ids[:2], [-1.0, -2.0], [0, 0], [0, 1])
    second = StepUpdate(0, 5, np.array([5]), np.array(ids[2:]), np.array([True]), np.array([-3], np.float32))
    assert stream.take(second).tokens == (ids[2:], [-3.0], [5], [2])


def test_what_is_provisional_is_not_told():
    ids = TOKENIZER.encode("ab")
    stream = TextStream(spec_of(2), TOKENIZER)
    update = StepUpdate(
        0, 0, np.array([3, 4]), np.array(ids), np.array([False, True]), np.zeros(2, np.float32)
    )
    assert stream.take(update).text == ""


def test_tokens_behind_the_end_are_told_where_all_are_asked_for():
    ids = [*TOKENIZER.encode("a"), CONFIG.eos_id, *TOKENIZER.encode("b")]
    order = [[place] for place in range(len(ids))]
    text, parts, told, _ = run(spec_of(len(ids), early_stop=False), ids, order)
    assert (text, told) == ("a", ids)
    assert parts == ["a", "", "", ""]
