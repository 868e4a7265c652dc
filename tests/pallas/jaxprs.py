"""Looks inside traced functions."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


def largest_intermediate(function: Callable[..., Any], *args: Any) -> int:
    """Elements of the largest array that any operation of `function(*args)` produces, nested ones included.

    `args` may be abstract.
    """
    jaxpr = jax.make_jaxpr(function)(*args)
    return max(math.prod(shape) for shape in _shapes(jaxpr.jaxpr))


def _shapes(jaxpr: Jaxpr) -> Iterator[tuple[int, ...]]:
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield getattr(variable.aval, "shape", ())
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, ClosedJaxpr):
                    yield from _shapes(inner.jaxpr)
                elif isinstance(inner, Jaxpr):
                    yield from _shapes(inner)
