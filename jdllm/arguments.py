"""Checks of what a caller passes: the name, its value and what would be right."""

import reprlib
from types import NoneType
from typing import Any, get_args

import numpy as np

from jdllm.errors import ConfigError, JdllmError


def positive(name: str, value: object, error: type[JdllmError]) -> int:
    """`value` as an integer, NumPy's too; `error` for what is none, booleans included, or below 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
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
