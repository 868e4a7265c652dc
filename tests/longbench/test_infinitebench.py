"""InfiniteBench's scores, by hand."""

import pytest

from jdllm.longbench.infinitebench import infinitebench_score
from jdllm.longbench.samples import Sample


def score(task: str, prediction: str, *answers: str) -> float:
    return infinitebench_score(prediction, Sample("", "context", "query", answers, task))


@pytest.mark.parametrize("task", ["passkey", "number_string"])
@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("is 71432.", 1),
        ("71432 and 5", 1),
        ("5 and 71432", 0),
        ("714", 0),
        ("071432", 0),
        ("none", 0),
        ("", 0),
    ],
)
def test_the_first_number_is_the_key(task: str, prediction: str, expected: float):
    assert score(task, prediction, "71432") == expected


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [('{"k": "ab-12"}', 1), ("it is:ab-12!", 1), ("ab-123", 0), ("AB-12", 0), ("", 0)],
)
def test_the_value_is_one_of_the_words(prediction: str, expected: float):
    assert score("kv_retrieval", prediction, "ab-12") == expected


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [("Bob.", 1), ("It's BOB, I think", 1), ("BOBBY", 0), ("Ann", 0), ("", 0)],
)
def test_the_character_is_one_of_the_words(prediction: str, expected: float):
    assert score("longdialogue_qa_eng", prediction, "BOB", "ANN") == expected


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("B", 1),
        ("  B. The fox", 1),
        ("A or B", 0),
        ("The fox", 1),
        ("I say the answer is B.", 1),
        ("I say the answer is: The fox, clearly", 1),
        ("I say the answer is", 0),
        ("the option is C, not B", 0),
        ("it must be B", 1),
        ("it must be D or B", 0),
        ("it must be BC", 0),  # "BC" is taken for a letter, and is none of the right ones
        ("fox", 0),
        ("", 0),
        ("  ", 0),
    ],
)
def test_choices(prediction: str, expected: float):
    assert score("longbook_choice_eng", prediction, "The fox", "B") == expected


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("B.", 1),
        (" B: load", 1),
        ("B", 0),  # as published
        ("A. load", 0),
        ("The answer is: B", 1),
        ("The answer is:\n`load`", 1),
        ("The answer is:load", 0),  # the character behind the colon is passed over
        ("The correct option is: load", 1),
        ("The answer is: C", 0),
        ("answer:", 0),
        ("load", 0),
        ("", 0),
    ],
)
def test_options_of_code(prediction: str, expected: float):
    assert score("code_debug", prediction, "load", "B") == expected


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [("-7", 1), ("func_1(3) is: -7.", 1), ("`-7`", 1), ("-7 it is", 0), ("7", 0), ("", 0)],
)
def test_the_last_word_is_the_value(prediction: str, expected: float):
    assert score("code_run", prediction, "-7") == expected


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("It is 42.", "42", 1),
        ("42 or 43", "42", 1),
        ("43 or 42", "42", 0),
        ("042", "42", 1),
        ("42.0", "42", 0),
        ("42", "42.0", 1),
        ("12.50", "12.5", 1),
        ("12", "12.5", 0),
        ("9" * 5000, "9", 0),
        ("none", "42", 0),
    ],
)
def test_the_first_number_is_found(prediction: str, answer: str, expected: float):
    assert score("math_find", prediction, answer) == expected


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("[8, 5, 7, 3]", 1),
        ("8 5 7 3 1 1", 1),
        ("8, 5, 9, 3", 2 / 4),
        ("9, 5, 7, 3", 0),
        ("8", 1 / 4),
        ("", 0),
        ("8 " + "5" * 5000, 1 / 4),
    ],
)
def test_values_count_up_to_the_first_wrong_one(prediction: str, expected: float):
    assert score("math_calc", prediction, "8", "5", "7", "3") == expected


def test_books_are_scored_by_the_best_answer():
    assert score("longbook_qa_eng", "the whale", "fox", "a blue whale") == pytest.approx(2 / 3)
    assert score("longbook_qa_chn", "在北京。", "上海", "北京") == pytest.approx(4 / 5)
    assert score("longbook_sum_eng", "A whale", "fox", "a blue whale\nswims") == pytest.approx(2 * 2 / 6)
