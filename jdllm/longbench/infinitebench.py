"""InfiniteBench's scores of one answer, from 0 to 1. Source: compute_scores.py of OpenBMB/InfiniteBench."""

import re
from collections.abc import Callable, Sequence

from jdllm.longbench.rouge import rouge_l_sum
from jdllm.longbench.samples import Sample
from jdllm.longbench.scores import qa_f1, qa_f1_characters
from jdllm.longbench.templates import INFINITEBENCH


def infinitebench_score(prediction: str, sample: Sample) -> float:
    """The score of an answer by its dataset's metric.

    Arguments:
    - `prediction`: what the model wrote.
    - `sample`: of a dataset of InfiniteBench. What its answers are depends on the dataset: alternatives for
      questions and summaries; the text of the right option and its letter for choices; the values in order
      for `math_calc`; and one answer, the first, for all others.
    """
    return float(_METRICS[INFINITEBENCH[sample.task].metric](prediction, sample.answers))


def first_number(prediction: str, answers: Sequence[str]) -> bool:
    """Whether the first run of digits is the answer, to the digit."""
    found = re.search("[0-9]+", prediction)
    return found is not None and found[0] == answers[0]


def last_number(prediction: str, answers: Sequence[str]) -> bool:
    """Whether the last word is the answer, as an integer."""
    words = _spaced(prediction, "\n.`'\":").split()
    try:
        return bool(words) and int(words[-1]) == int(answers[0])
    except ValueError:
        return False


def number(prediction: str, answers: Sequence[str]) -> bool:
    """Whether the first number, a sign left out, is the answer.

    A decimal number is never an integer answer; the published script fails on one.
    """
    found = re.search(r"\d+\.\d+|\d+", prediction)
    if found is None:
        return False
    if "." in answers[0]:
        return float(found[0]) == float(answers[0])
    return _same_integer(found[0], answers[0])


def leading_values(prediction: str, answers: Sequence[str]) -> float:
    """The share of the values that are right before the first wrong one; signs do not count in the answer."""
    numbers = re.findall("[0-9]+", prediction)
    right = [_same_integer(found, value) for found, value in zip(numbers, answers, strict=False)]
    return [*right, False].index(False) / len(answers)


def contained_word(prediction: str, answers: Sequence[str]) -> bool:
    """Whether the answer is one of the words."""
    return answers[0] in _spaced(prediction, "\n:\"'.,?!{}").split()


def name(prediction: str, answers: Sequence[str]) -> bool:
    """Whether the answer, a name in capitals, is one of the words in capitals."""
    return contained_word(prediction.upper(), answers)


def choice(prediction: str, answers: Sequence[str]) -> bool:
    """Whether the right option is chosen: by the letter that comes first, by its very text, by what follows
    "answer is" and its kin, or by the first letter that stands alone."""
    prediction = prediction.strip()
    if not prediction:
        return False
    if prediction[0] in "ABCD":
        return prediction[0] in answers
    if prediction in answers:
        return True
    prediction = _single_spaced(_spaced(prediction, "\n\"'.,?!{}"))
    stated = _after(prediction, ("answer is:", "answer:", "answer is", "option is"))
    if stated is not None:
        return stated.startswith(tuple(answers))
    letters = [word for word in prediction.split() if word in "ABCD"]
    return bool(letters) and letters[0] in answers


def option(prediction: str, answers: Sequence[str]) -> bool:
    """Whether the right option is chosen: by its letter with "." or ":" at the start, or by what follows
    "answer is:" and its kin, its letter or its text. A letter alone is not taken, as published."""
    text, letter = answers[:2]
    prediction = prediction.strip()
    if prediction.startswith((f"{letter}.", f"{letter}:")):
        return True
    prediction = re.sub("[Oo]ption", " ", _spaced(prediction, "\n`'\"-*"))
    stated = _after(_single_spaced(prediction), ("answer is:", "is:", "answer:"))
    return stated is not None and stated.startswith((letter, text))


def _same_integer(digits: str, value: str) -> bool:
    # As texts: Python refuses to read integers of some thousand digits, which a model may well write.
    return digits.lstrip("0") == value.lstrip("0")


def _best(score: Callable[[str, str], float]) -> Callable[[str, Sequence[str]], float]:
    return lambda prediction, answers: max(score(prediction, answer) for answer in answers)


def _after(text: str, prefixes: Sequence[str]) -> str | None:
    """The text behind the first prefix that occurs, and one character more; `None` without."""
    for prefix in prefixes:
        _, found, rest = text.partition(prefix)
        if found:
            return rest[1:]
    return None


def _spaced(text: str, characters: str) -> str:
    return text.translate(str.maketrans(dict.fromkeys(characters, " ")))


def _single_spaced(text: str) -> str:
    return re.sub(" +", " ", text)


_METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "first_number": first_number,
    "last_number": last_number,
    "number": number,
    "leading_values": leading_values,
    "contained_word": contained_word,
    "name": name,
    "choice": choice,
    "option": option,
    "qa_f1": _best(qa_f1),
    "qa_f1_characters": _best(qa_f1_characters),
    "rouge_l_sum": _best(rouge_l_sum),
}
