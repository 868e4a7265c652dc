"""Both forms of ROUGE-L, by hand and against all common subsequences."""

import itertools
import random

import pytest

from jdllm.longbench.rouge import aligned, rouge_l, rouge_l_sum

W = [f"w{i}" for i in range(10)]
PAPER_TRUTH = "w1 w2 w3 w4 w5"
PAPER = ("w1 w2 w6 w7 w8", "w1 w3 w8 w9 w5")
"""The example of Lin's paper on ROUGE: the union of both alignments is w1 w2 w3 w5."""


def f(hits: int, ours: int, theirs: int) -> float:
    return 2 * hits / (ours + theirs)


@pytest.mark.parametrize(
    ("prediction", "truth", "hits", "ours", "theirs"),
    [
        (". ".join(PAPER), PAPER_TRUTH, 4, 8, 5),
        ("the cat sat", "the cat sat", 3, 3, 3),
        ("the the cat", "the cat", 2, 2, 2),  # distinct words only
        ("cat the", "the cat", 1, 2, 2),
        ("Cat", "cat", 0, 1, 1),  # as written
        ("Yes. ", "Yes", 1, 2, 1),  # a blank sentence is an empty word
        ("a.b", "a b", 2, 2, 2),
        ("b a. b", "a b", 1, 2, 2),  # a tie keeps the later word of the truth
        ("x y", "a b. x. y", 2, 2, 4),
    ],
)
def test_rouge_l_by_hand(prediction: str, truth: str, hits: int, ours: int, theirs: int):
    assert rouge_l(prediction, truth) == pytest.approx(f(hits, ours, theirs), abs=1e-7)


def test_rouge_l_is_below_one_by_its_published_constant():
    assert rouge_l("same", "same") == 2 / (2 + 1e-8)


@pytest.mark.parametrize("empty", ["", ".", "..."])
def test_rouge_l_of_texts_without_sentences_is_zero(empty: str):
    assert rouge_l(empty, "word") == rouge_l("word", empty) == 0


def test_rouge_l_takes_sentences_of_any_length():
    text = " ".join(map(str, range(1500)))
    assert rouge_l(text, text) == pytest.approx(1)


@pytest.mark.parametrize(
    ("prediction", "truth", "hits", "ours", "theirs"),
    [
        ("\n".join(PAPER), PAPER_TRUTH, 4, 10, 5),
        ("The cat -- sat!", "the cat sat", 3, 3, 3),
        ("the the cat", "the cat", 2, 3, 2),
        ("a", "a\na", 1, 1, 2),  # not more often than the prediction has it
        ("b a\nb", "a b", 2, 3, 2),  # a tie keeps the earlier word of the truth
        ("a\n\n\nb", "a b", 2, 2, 2),
        ("é", "e", 0, 1, 1),
    ],
)
def test_rouge_l_sum_by_hand(prediction: str, truth: str, hits: int, ours: int, theirs: int):
    assert rouge_l_sum(prediction, truth) == pytest.approx(f(hits, ours, theirs))


def longest_common(first: list[str], second: list[str]) -> int:
    """By trying all subsequences."""
    for length in range(len(first), 0, -1):
        parts = set(itertools.combinations(second, length))
        if any(part in parts for part in itertools.combinations(first, length)):
            return length
    return 0


def test_alignments_are_longest_common_subsequences():
    draw = random.Random(0)
    for _ in range(200):
        first, second = (draw.choices(W[:4], k=draw.randrange(8)) for _ in range(2))
        for prefer_first in (False, True):
            words = [first[i] for i in reversed(aligned(first, second, prefer_first=prefer_first))]
            rest = iter(second)
            assert all(word in rest for word in words)
            assert len(words) == longest_common(first, second)


def test_both_forms_agree_where_words_are_distinct():
    draw = random.Random(1)
    for _ in range(100):
        ours, theirs = (draw.sample(W, k=draw.randrange(1, 7)) for _ in range(2))
        expected = f(longest_common(theirs, ours), len(ours), len(theirs))
        assert rouge_l(" ".join(ours), " ".join(theirs)) == pytest.approx(expected, abs=1e-7)
        assert rouge_l_sum(" ".join(ours), " ".join(theirs)) == pytest.approx(expected)
