"""The figures of two models on the same instances, by hand."""

import numpy as np
import pytest

from jdllm.demo.compare import compare, render_comparisons, same_tokens
from jdllm.demo.tasks import Instance
from jdllm.demo.tokenizer import EOS, EOT

LENGTH = 6
ASKED = [
    Instance("addition", "1+1=", "2"),
    Instance("addition", "5+7=", "12"),
    Instance("sorting", "sort cab=", "abc"),
    Instance("sorting", "sort ed=", "de"),
    Instance("sorting", "sort f=", "f"),
]


def tokens(*texts: str, end: int = EOS) -> np.ndarray:
    rows = [[*text.encode(), end] for text in texts]
    return np.array([row + [EOS] * (LENGTH - len(row)) for row in rows], np.int32)


FIRST = tokens("2", "12", "abc", "ed", "f")
SECOND = tokens("2", "13", "acb", "de", "g")


def tango(wins: int, losses: int, pairs: int) -> tuple[float, float]:
    """The differences that Tango's test does not reject at 5 %, on a grid of 1e-3.

    The likeliest probability of a loss, given the difference, is the one of a fine grid.
    """
    kept = []
    losing = np.linspace(1e-7, 1, 20_001)[:-1]
    for difference in np.arange(-0.9999, 1, 1e-3):
        p = losing[(losing + difference > 0) & (2 * losing + difference < 1)]
        rest = pairs - wins - losses
        likely = wins * np.log(p + difference) + losses * np.log(p) + rest * np.log(1 - 2 * p - difference)
        best = p[likely.argmax()]
        variance = pairs * (2 * best + difference - difference**2)
        if abs(wins - losses - pairs * difference) <= 1.959964 * np.sqrt(variance):
            kept.append(difference)
    return kept[0], kept[-1]


def test_figures_of_two_models():
    addition, sorting, together = compare(ASKED, FIRST, SECOND)
    assert [one.task for one in (addition, sorting, together)] == ["addition", "sorting", "all"]
    assert [one.instances for one in (addition, sorting, together)] == [2, 3, 5]
    assert (addition.exact_match, addition.compared_exact_match, addition.difference) == (1, 0.5, -0.5)
    assert (sorting.exact_match, sorting.compared_exact_match, sorting.difference) == (2 / 3, 1 / 3, -1 / 3)
    assert (together.exact_match, together.compared_exact_match, together.difference) == (0.8, 0.4, -0.4)
    # Equal tokens, ends included: 2 of 2, 2 of 3; 2 of 4, 1 of 3, 1 of 2.
    assert [one.same_tokens for one in (addition, sorting, together)] == [4 / 5, 4 / 9, 8 / 14]


def test_the_interval_is_that_of_the_pairs():
    addition, sorting, together = compare(ASKED, FIRST, SECOND)
    for one, (wins, losses) in ((addition, (0, 1)), (sorting, (1, 2)), (together, (1, 3))):
        assert (one.low, one.high) == pytest.approx(tango(wins, losses, one.instances), abs=2e-3)


def test_a_model_and_itself():
    for one in compare(ASKED, FIRST, FIRST):
        assert (one.difference, one.same_tokens) == (0, 1)
        assert one.low == pytest.approx(-one.high)
        assert one.low < 0


def test_tokens_count_up_to_the_later_end():
    first = np.array([[1, 2, EOS, EOS, EOS, EOS], [1, 2, 3, 4, 5, 6]])
    second = np.array([[1, 2, 3, EOS, EOS, 7], [1, 2, 3, 4, 5, 7]])
    assert same_tokens(first, second) == same_tokens(second, first) == (3 + 5) / (4 + 6)
    assert same_tokens(first, first) == 1


def test_another_end_is_another_token_of_the_same_answer():
    (_, together) = compare(ASKED[:1], tokens("2"), tokens("2", end=EOT))
    assert (together.difference, together.same_tokens) == (0, 0.5)


def test_the_table_has_every_figure():
    header, *_, together = render_comparisons(compare(ASKED, FIRST, SECOND)).splitlines()
    assert header.split("  ")[0] == "task"
    cells = together.split()
    assert cells[:5] == ["all", "5", "80.0%", "40.0%", "-40.00"]
    assert cells[-1] == "57.14%"


def test_answers_that_are_no_pairs_are_refused():
    with pytest.raises(ValueError, match="argument 2 is longer"):
        compare(ASKED, FIRST, SECOND[:3])
