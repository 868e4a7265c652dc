"""Texts of many facts: what they tell, what may be asked, and where that stands."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdllm.demo.long_tasks import LONG_TASKS, Haystack, draw_pairs, is_whole, long_stream
from jdllm.demo.tasks import GEN_LENGTH
from jdllm.demo.tokenizer import BOS, plain_ids
from jdllm.errors import RequestError
from jdllm.prefilling.chunks import cut


def answers(text: str, query: str) -> list[str]:
    """All answers that a text gives to a query, worked out from both alone."""
    if query.startswith("get "):
        return re.findall(rf"(?:^|;){query.removeprefix('get ')}(\d+);", text)
    facts = re.findall(r"(\w+) has (\d) (\w+) (\w+)\.", text)
    if many := re.fullmatch(r"How many (\w+) does (\w+) have\?", query):
        thing, name = many.groups()
        return [
            f"{name} has {count} {thing}." for who, count, _, what in facts if (who, what) == (name, thing)
        ]
    colored = re.fullmatch(r"What color are the (\w+) of (\w+)\?", query)
    assert colored
    thing, name = colored.groups()
    return [f"The {thing} are {color}." for who, _, color, what in facts if (who, what) == (name, thing)]


@pytest.mark.parametrize("task", LONG_TASKS)
@given(seed=st.integers(0, 2**32 - 1), length=st.integers(40, 5000))
@settings(max_examples=40, deadline=None)
def test_every_question_has_the_only_answer_that_the_text_gives(task: str, seed: int, length: int):
    haystack = LONG_TASKS[task](np.random.default_rng(seed), length)
    assert len(haystack.text) == length
    assert haystack.text.isascii()
    for fact in haystack.facts:
        assert answers(haystack.text, fact.query) == [fact.answer]
        assert answers(haystack.text[fact.start : fact.stop], fact.query) == [fact.answer]
        assert len(fact.answer) < GEN_LENGTH
    assert answers(haystack.text, haystack.absent) == []
    assert len({fact.query for fact in haystack.facts}) == len(haystack.facts)


@pytest.mark.parametrize("task", LONG_TASKS)
def test_the_longest_text_has_facts_in_all_of_its_parts(task: str):
    length = 2**17
    haystack = LONG_TASKS[task](np.random.default_rng(0), length)
    tenths = np.histogram([fact.start for fact in haystack.facts], 10, (0, length))[0]
    assert tenths.min() >= 0.8 * tenths.max() > 5
    keys = re.findall(r"(\w{4})=", haystack.text)
    assert len(set(keys)) == len(keys)


@given(chunk_length=st.integers(30, 300), start=st.integers(0, 50), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_a_whole_fact_is_answered_by_one_chunk(chunk_length: int, start: int, seed: int):
    haystack = draw_pairs(np.random.default_rng(seed), 1000).crop(start, 1000)
    chunks = cut(np.array(plain_ids(haystack.text), np.int32), chunk_length, BOS)
    texts = [bytes(chunk.tokens[1:].tolist()).decode() for chunk in chunks]
    for fact in haystack.facts:
        told = haystack.text[fact.start : fact.stop]
        holding = [i for i, text in enumerate(texts) if told in text]
        if is_whole(fact, chunk_length):
            assert holding == [fact.start // chunk_length]
        elif fact.stop < len(haystack.text):
            assert holding == [] or fact.stop % chunk_length == 0


def test_a_cropped_text_keeps_the_facts_that_are_whole():
    whole = draw_pairs(np.random.default_rng(0), 90)
    part = whole.crop(5, 31)
    assert part == Haystack(
        whole.text[5:31],
        [f._replace(start=f.start - 5, stop=f.stop - 5) for f in whole.facts[1:3]],
        whole.absent,
    )


@pytest.mark.parametrize("task", LONG_TASKS)
def test_no_text_is_in_both_splits(task: str):
    draw = LONG_TASKS[task]
    train, test = (
        {h.text for h in itertools.islice(long_stream(draw, split, np.random.default_rng(0), 20), 300)}
        for split in ("train", "test")
    )
    assert not train & test


def test_more_pairs_than_keys_are_refused():
    assert len(draw_pairs(np.random.default_rng(0), 675 * 7, key_letters=2).facts) == 675
    with pytest.raises(RequestError, match="2 letters make 676: use longer keys"):
        draw_pairs(np.random.default_rng(0), 675 * 7 + 1, key_letters=2)
