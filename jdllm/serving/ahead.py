"""Requests a part later: a step is packed before the host has seen what the step before it commits."""

import copy
import time

import numpy as np

from jdllm.decoding.registry import number_of
from jdllm.decoding.transfer.quota import QUOTA
from jdllm.serving.launch import Launch, Stored
from jdllm.serving.progress import Awaited
from jdllm.serving.request import Request


def told_by_table(request: Request) -> bool:
    """Whether a table says how many tokens each step of the request commits, and nothing that its next step
    needs depends on which tokens these are."""
    segment, edits = request.spec.segment, request.sampling.editing_threshold is not None
    told = segment["rule"] == number_of(QUOTA) and not segment["pooled"] and not edits
    return bool(told and request.matcher is None)


def later(request: Request, launch: Launch, index: int) -> Request | None:
    """A request as it will be after a part that runs, apart from the tokens that the part commits.

    Arguments:
    - `launch`, `index`: the part, and the place of the request in it.

    Returns a copy, which waits for these tokens; `None` where the part leaves no tokens to others, and where
    it may end the block, unless the request `goes_on`: then the part has one step, which surely ends the
    block, and the copy is in the next one. The text may end with the block all the same. Then the host finds
    no request any more for which it could take in the part that runs ahead.
    """
    if launch.left_at is None or not told_by_table(request):
        return None
    masked = len(request.masked())
    over = request.steps_left <= launch.steps or launch.steps * _committed(request, masked) >= masked
    if over and not request.goes_on:
        return None
    after, stored = copy.copy(request), launch.stored[index]
    if stored is not None:
        after.store(*stored)
    after.pass_over(launch.steps)
    if over:
        after.enter_next()
    after.ready = time.perf_counter()
    after.awaited = Awaited(launch.candidates[index], launch.left_at[index])
    return after


def with_stored(request: Request, stored: Stored) -> Request:
    """A copy of a request as it will be after a part that commits none of its tokens.

    Arguments:
    - `stored`: what the part stores of it.
    """
    after = copy.copy(request)
    after.ready = time.perf_counter()
    after.store(*stored)
    return after


def _committed(request: Request, masked: int) -> int:
    """How many tokens the next step commits at most.

    Arguments:
    - `masked`: masked positions up to the end of the block.
    """
    segment, table = request.segment, request.table_left(1)
    if segment["by_fraction"]:
        return int(np.float32(masked) * table.fraction[0])
    return int(table.quota[0]) + (masked if segment["plus_masked"] else 0)
