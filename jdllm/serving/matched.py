"""Requests whose answers have a given form: a grammar follows each of them, token by token."""

from collections.abc import Sequence

import numpy as np

from jdllm.pallas.masked_logits import RowControl
from jdllm.serving.request import Request

_PATIENCE = 5e-3
"""Seconds that a step waits for a grammar, which takes less than a millisecond for a token as a rule."""


def prepared(requests: list[Request], *, others: bool) -> list[Request]:
    """Those of some requests whose next step can be packed. A grammar that takes long for a token is no
    reason for others to wait.

    Arguments:
    - `others`: whether there is something else to do; otherwise all are taken where none is ready.
    """
    ready = [r for r in requests if r.matcher is None or r.matcher.ready(_PATIENCE)]
    return ready if ready or others else requests


def followed(control: RowControl, requests: Sequence[Request]) -> RowControl:
    """The controls of requests, of which those with a grammar may have the tokens that go on.

    Raises `RequestError` for a request whose grammar cannot be followed.
    """
    if all(request.matcher is None for request in requests):
        return control
    allowed = np.array(control.allowed)
    for row, request in zip(allowed, requests, strict=False):
        if request.matcher is not None:
            row[:] = request.matcher.allowed()
    return control._replace(allowed=allowed)
