"""Two models that answered the same instances of the demo's tasks."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int, Int32

from jdllm.demo.evaluate import aligned
from jdllm.demo.paired import discordance
from jdllm.demo.tasks import Instance
from jdllm.demo.tokenizer import EOS, EOT, answer_text

ALL = "all"
"""What stands for the tasks together."""

Tokens = Int32[np.ndarray, "instances gen_length"]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Figures of two models on the instances of one task, or of all.

    - `exact_match`, `compared_exact_match`: the share of answers of the first and of the second model that
      equal the right one.
    - `difference`: the second share minus the first.
    - `low`, `high`: Tango's 95 % interval of `difference` (`jdllm.demo.paired.Discordance.interval`).
    - `same_tokens`: the share of equal tokens, as `same_tokens` counts them.
    """

    task: str
    instances: int
    exact_match: float
    compared_exact_match: float
    difference: float
    low: float
    high: float
    same_tokens: float


def compare(asked: Sequence[Instance], first: Tokens, second: Tokens) -> list[Comparison]:
    """Compare the answers of two models.

    Arguments:
    - `asked`: the instances, of one task or several.
    - `first`, `second`: the tokens that each model generated for each instance, in order.

    Returns one comparison for each task, in the order of `asked`, and then one named `ALL`.

    Raises `ValueError` where the numbers of answers and instances differ.
    """
    first_right, second_right = (_right(tokens, asked) for tokens in (first, second))
    names = np.array([instance.task for instance in asked])
    parts = {name: names == name for name in dict.fromkeys(names.tolist())}
    parts[ALL] = np.ones(len(asked), bool)
    return [
        _compared(name, first[part], second[part], first_right[part], second_right[part])
        for name, part in parts.items()
    ]


def _compared(
    name: str,
    first: Tokens,
    second: Tokens,
    first_right: Bool[np.ndarray, " instances"],
    second_right: Bool[np.ndarray, " instances"],
) -> Comparison:
    counts = discordance(second_right.tolist(), first_right.tolist())
    low, high = counts.interval()
    shares = float(first_right.mean()), float(second_right.mean())
    return Comparison(name, len(first), *shares, counts.difference, low, high, same_tokens(first, second))


def _right(tokens: Tokens, asked: Sequence[Instance]) -> Bool[np.ndarray, " instances"]:
    pairs = zip(tokens.tolist(), asked, strict=True)
    return np.array([answer_text(ids) == instance.answer for ids, instance in pairs])


def same_tokens(first: Tokens, second: Tokens) -> float:
    """The share of positions at which two models have equal tokens, over all answers.

    Arguments:
    - `first`, `second`: the tokens of each model.

    Positions of a pair of answers count up to the later of the two ends, end ids included, so that the fill
    behind the ends cannot hide differences.
    """
    lengths = np.maximum(_text_length(first), _text_length(second))
    counted = np.arange(first.shape[1]) < lengths[:, None]
    return float((first == second)[counted].mean())


def _text_length(tokens: Tokens) -> Int[np.ndarray, " instances"]:
    """Tokens of each text, with its end id where there is one."""
    ends = np.isin(tokens, (EOS, EOT))
    return np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, tokens.shape[1])


def render_comparisons(comparisons: Sequence[Comparison]) -> str:
    """The comparisons as an aligned text table; differences and intervals are in percentage points."""
    header = ("task", "instances", "exact match", "compared", "difference", "95% interval", "same tokens")
    body = [
        (
            one.task,
            str(one.instances),
            f"{one.exact_match:.1%}",
            f"{one.compared_exact_match:.1%}",
            f"{100 * one.difference:+.2f}",
            f"{100 * one.low:+.2f} to {100 * one.high:+.2f}",
            f"{one.same_tokens:.2%}",
        )
        for one in comparisons
    ]
    return aligned(header, body)
