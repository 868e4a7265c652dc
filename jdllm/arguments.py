"""Checks of what a caller passes: the name, its value and what would be right."""

import numbers
import reprlib
from collections.abc import Iterable
from types import NoneType
from typing import Any, get_args

from jdllm.errors import ConfigError, JdllmError


def positive(name: str, value: object, error: type[JdllmError]) -> int:
    """`value` as an integer, NumPy's too; `error` for what is none, booleans included, or below 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise error(f"{name} is {shortened(value)}, expected a positive integer")
    return int(value)


def check_types(**arguments: tuple[object, Any]) -> None:
    """Raise `ConfigError` for the first of the named values that is not of its class, or union of classes."""
    for name, (value, kinds) in arguments.items():
        if not isinstance(value, kinds):
            expected = " or ".join(
                "None" if kind is NoneType else kind.__name__ for kind in get_args(kinds) or (kinds,)
            )
            raise ConfigError(f"{name} is {shortened(value)}, expected {expected}")


def shortened(value: object) -> str:
    """`value` as Python writes it, on one line of bounded length."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python does not write integers beyond some thousand digits
        return f"an integer of {int(value).bit_length()} bits" if isinstance(value, int) else "unprintable"


def resembling(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is likely a misspelling of, if there is one.

    Arguments:
    - `name`: is none of `known`.

    A misspelling differs by at most two letters that are missing, wrong, too many or swapped with the next
    one, and by at most a third of the longer name: `id` is no misspelling of `n`. Case does not count.
    """
    most = {one: min(2, max(len(name), len(one)) // 3) for one in known}
    near = [one for one in most if abs(len(one) - len(name)) <= most[one]]
    distances = {one: _edits(name.casefold(), one) for one in near}
    found = [one for one in near if distances[one] <= most[one]]
    return min(found, key=distances.__getitem__, default=None)


def _edits(a: str, b: str) -> int:
    """How many letters are missing, wrong, too many or swapped between two names."""
    before, row = [], list(range(len(b) + 1))
    for i in range(1, len(a) + 1):
        further, before, row = before, row, [i]
        for j in range(1, len(b) + 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a[i - 1] != b[j - 1]))
            if i > 1 and j > 1 and a[i - 2 : i] == b[j - 1] + b[j - 2]:
                cost = min(cost, further[j - 2] + 1)
            row.append(cost)
    return row[-1]
