"""Traces of parts in which each request gets no more than the next tokens of its text."""

from collections.abc import Sequence

import numpy as np

from jdllm.decoding.encoded_trace import Steps


def by_request(found: Steps, order: np.ndarray, requests: int) -> Steps:
    """The columns of a trace in the order of the requests; nothing is committed for those without one."""
    place = np.full(requests, -1)
    place[order] = np.arange(len(order))
    columns = Steps(*(x[:, place] for x in found))
    return columns._replace(committed=columns.committed & (place >= 0))


def spread(found: Steps, counts: Sequence[int]) -> Steps:
    """A trace with a column for each token that a request may get, from one with a column for each request.

    Arguments:
    - `counts`: columns of each request; the token of step i is in the i-th.
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    turn = np.concatenate([np.arange(count) for count in counts])
    own = np.arange(len(found.tokens))[:, None] == turn
    tokens, committed, logprobs, likeliest = (x[:, owner] for x in found)
    logprobs = np.where(own, logprobs, np.float32(0))
    return Steps(np.where(own, tokens, 0), committed & own, logprobs, likeliest)
