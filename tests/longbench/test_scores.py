"""LongBench's scores, by hand."""
# ruff: noqa: RUF001 - Chinese punctuation is meant

import pytest

from jdllm.longbench.samples import Sample
from jdllm.longbench.scores import (
    classification,
    code_similarity,
    count,
    longbench_score,
    qa_f1,
    qa_f1_characters,
    retrieval,
    rouge_l_characters,
)


def sample(task: str, *answers: str, classes: tuple[str, ...] = ()) -> Sample:
    return Sample("", "context", "query", answers, task, classes)


@pytest.mark.parametrize(
    ("prediction", "truth", "expected"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1),
        ("an eiffel", "Eiffel Tower", 2 * 1 * 0.5 / 1.5),
        ("red red blue", "red green", 2 * (1 / 3) * (1 / 2) / (5 / 6)),
        ("U.S.", "us", 1),  # points go before words are told apart
        ("Paris", "London", 0),
        ("", "London", 0),
        ("the", "a", 0),
    ],
)
def test_f1_of_words(prediction: str, truth: str, expected: float):
    assert qa_f1(prediction, truth) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "truth", "expected"),
    [
        ("北京。", "北京", 1),
        ("在 北京，A", "北京a!", 2 * (3 / 4) * 1 / (7 / 4)),
        ("上海", "北京", 0),
        ("《", "北", 0),
    ],
)
def test_f1_of_characters(prediction: str, truth: str, expected: float):
    assert qa_f1_characters(prediction, truth) == pytest.approx(expected)


def test_rouge_of_characters():
    assert rouge_l_characters("今天 开会", "今天下午开会") == pytest.approx(2 * 4 / 10, abs=1e-7)


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [("City", 1), ("City or Date", 1 / 2), ("It is a City, a Date, a Food", 1 / 3), ("Date", 0), ("city", 0)],
)
def test_classification_shares_the_point_among_the_named(prediction: str, expected: float):
    assert classification(prediction, "City", ["City", "Date", "Food"]) == expected


def test_a_class_within_the_right_ones_name_does_not_count():
    assert classification("Other location", "Other location", ["location", "Other location"]) == 1
    assert classification("location", "Other location", ["location", "Other location"]) == 0


def test_of_two_such_classes_in_a_row_the_second_counts():
    """The published loop drops "location" and then looks at the third class: "Other" stays."""
    classes = ["location", "Other", "Other location"]
    assert classification("Other location", "Other location", classes) == 1 / 2


@pytest.mark.parametrize(
    ("prediction", "truth", "expected"),
    [
        ("Paragraph 7", "Paragraph 7", 1),
        ("7 or 12, not 70", "Paragraph 7", 1 / 3),
        ("none", "Paragraph 7", 0),
        ("段落12", "段落12", 1),
        ("第1段，段落12", "段落12", 1 / 2),
    ],
)
def test_retrieval_is_the_share_of_right_numbers(prediction: str, truth: str, expected: float):
    assert retrieval(prediction, truth) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "expected"), [("13", 1), ("13 of 20", 1 / 2), ("013", 0), ("thirteen", 0)]
)
def test_count_is_the_share_of_right_numbers(prediction: str, expected: float):
    assert count(prediction, "13") == expected


@pytest.mark.parametrize(
    ("prediction", "truth", "expected"),
    [
        ("return x\nreturn y", "return x", 1),
        ("\n\n# first\n```\nabcd", "abce", 0.75),  # blocks of 3 of 8 characters: 6 / 8
        ("abc", "abxxx", 0.5),  # 4 / 8
        ("ab", "abxxx", 0.57),  # 4 / 7, in whole percent
        ("// nothing else", "x", 0),
        ("", "x", 0),
        ("ab" * 200, "ab" * 200, 1),
    ],
)
def test_code_similarity_of_the_first_line_of_code(prediction: str, truth: str, expected: float):
    assert code_similarity(prediction, truth) == expected


def test_the_best_of_several_answers_counts():
    assert longbench_score("blue whale", sample("hotpotqa", "red fox", "whale")) == pytest.approx(2 / 3)
    assert longbench_score("gone", sample("hotpotqa", "red fox", "whale")) == 0


@pytest.mark.parametrize("task", ["triviaqa", "samsum"])
def test_of_datasets_with_examples_the_first_line_counts(task: str):
    assert longbench_score("\n\nred fox\nQuestion: blue", sample(task, "red fox")) == pytest.approx(1)


@pytest.mark.parametrize("task", ["trec", "lsht"])
def test_of_datasets_with_classes_the_first_line_counts(task: str):
    asked = sample(task, "City", classes=("City", "Date"))
    assert longbench_score("City\nType: Date", asked) == 1


@pytest.mark.parametrize(
    ("task", "prediction", "answer"),
    [
        ("narrativeqa", "a fox\nor more", "fox more or"),
        ("multifieldqa_zh", "北\n京", "北京"),
        ("gov_report", "rivers\nrise", "rivers rise"),
        ("vcsum", "开\n会", "开会"),
        ("passage_count", "is\n5", "5"),
        ("passage_retrieval_zh", "是\n段落3", "段落3"),
        ("repobench-p", "#\nx = 1\ny", "x = 1"),
    ],
)
def test_of_other_datasets_the_whole_answer_counts(task: str, prediction: str, answer: str):
    assert longbench_score(prediction, sample(task, answer)) == pytest.approx(1)
