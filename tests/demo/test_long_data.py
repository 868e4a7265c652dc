"""Examples of the retrieval model lie as the pipeline lays out what it evaluates."""

import itertools

import numpy as np
import pytest

from jdllm.demo.data import Asked
from jdllm.demo.long_data import (
    LONGEST_QUERY,
    RETRIEVAL_BUCKETS,
    LongBucket,
    draw_answering,
    draw_scoring,
    held_out,
    make_long_batches,
)
from jdllm.demo.long_tasks import ABSENT, INSTRUCTION, LONG_TASKS
from jdllm.demo.tasks import GEN_LENGTH
from jdllm.demo.tokenizer import BOS, EOS
from jdllm.prefilling.segments import ends
from tests.demo.test_long_tasks import answers


def text_of(tokens: np.ndarray) -> str:
    """Special tokens begin a line."""
    return "".join(chr(token) if token < 256 else "\n" for token in tokens.tolist())


def asked_in(text: str) -> tuple[str, str]:
    """What stands before the question, and the question."""
    at = max(text.rfind(word) for word in ("get ", "How ", "What "))
    return text[:at], text[at:]


@pytest.mark.parametrize("task", LONG_TASKS)
@pytest.mark.parametrize("length", [192, 640, 2176])
def test_a_question_is_answered_by_the_chunks_before_it(task: str, length: int):
    rng = np.random.default_rng(0)
    absent = plain = gaps = 0
    for _ in range(150):
        rows, prompt_length = draw_answering(rng, task, length)
        assert rows.size <= length
        assert set(rows.k_end.tolist()) == {rows.size}
        assert np.all(np.diff(rows.positions) > 0)
        response = rows.tokens[prompt_length:].tolist()
        answer = bytes(itertools.takewhile(lambda token: token != EOS, response)).decode()
        assert response == [*answer.encode(), *[EOS] * (GEN_LENGTH - len(answer))]
        context, query = asked_in(text_of(rows.tokens[:prompt_length]))
        told = [found for chunk in context.split("\n") for found in answers(chunk, query)]
        assert told == ([] if answer == ABSENT else [answer])
        absent += answer == ABSENT
        plain += BOS not in rows.tokens
        gaps += np.any(np.diff(rows.positions) > 1)
    assert 3 < absent < 35
    assert 15 < plain < 65
    assert gaps > 5


@pytest.mark.parametrize("task", LONG_TASKS)
def test_a_scored_query_sees_only_what_is_before_it(task: str):
    rng, masks = np.random.default_rng(0), set()
    told = pieces = 0
    for _ in range(150):
        rows, before = draw_scoring(rng, task, 384)
        assert rows.size <= 384
        scored = rows.size - before
        start = before - scored
        np.testing.assert_array_equal(rows.tokens[before:], rows.tokens[start:before])
        np.testing.assert_array_equal(rows.positions[:before], np.arange(before))
        np.testing.assert_array_equal(rows.positions[before:], np.arange(start, before))
        np.testing.assert_array_equal(rows.k_end[before:], np.arange(start, before))
        prefix = rows.tokens.tolist().index(BOS)
        assert text_of(rows.tokens[:prefix]) in ("", INSTRUCTION)
        full, causal = (ends(mask, prefix, start - prefix, scored) for mask in ("full", "causal"))
        seen = rows.k_end[:before].tolist()
        assert seen in (full.tolist(), causal.tolist())
        masks.add(seen == causal.tolist())
        chunk, query = text_of(rows.tokens[prefix + 1 : start]), text_of(rows.tokens[before:])
        if query.startswith(("get ", "How ", "What ")):
            told += bool(answers(chunk, query))
        else:
            assert query in chunk
            assert len(query) == LONGEST_QUERY
            pieces += 1
    assert masks == {False, True}
    assert 55 < pieces < 95
    assert 0.4 < told / (150 - pieces) < 0.8


def test_batches_hold_examples_of_all_buckets():
    buckets = LongBucket(256, 5, scoring=True), LongBucket(320, 3, scoring=False)
    batches = make_long_batches(buckets, steps=2, seed=0, index=0)
    rows, examples = 5 * 256 + 3 * 320, 8
    assert [x.shape for x in batches] == [(2, rows)] * 3 + [(2, examples)] * 2
    assert np.all(batches.prompt_length < batches.total_length)
    assert np.all(batches.total_length[:, 5:] - batches.prompt_length[:, 5:] == GEN_LENGTH)
    again, other = (make_long_batches(buckets, 2, seed=0, index=i) for i in (0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))
    assert not np.array_equal(batches.tokens, other.tokens)


def test_the_buckets_reach_sixteen_chunks_of_256():
    longest = max(bucket.length for bucket in RETRIEVAL_BUCKETS)
    rng = np.random.default_rng(0)
    positions = [draw_answering(rng, "pairs", longest).rows.positions[-1] for _ in range(20)]
    assert max(positions) >= 16 * 256 + GEN_LENGTH
    assert max(positions) < 2**16


def test_held_out_questions_are_answered_by_what_stands_before_them():
    found = held_out(3, seed=0)
    assert [*found] == [f"{task} {length}" for task in LONG_TASKS for length in (256, 1024)]
    for asked in itertools.chain.from_iterable(found.values()):
        assert isinstance(asked, Asked)
        context, query = asked_in(text_of(np.array(asked.prompt)))
        assert [a for chunk in context.split("\n") for a in answers(chunk, query)] == [asked.answer]
