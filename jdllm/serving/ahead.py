"""Requests one step later: a step is packed before the host has seen what the step before it commits."""

import copy
import time

import numpy as np

from jdllm.decoding.registry import number_of
from jdllm.decoding.transfer.quota import QUOTA
from jdllm.serving.launch import Launch
from jdllm.serving.request import Awaited, Request


def told_by_table(request: Request) -> bool:
    """Whether a table says how many tokens each step of the request commits, whatever the model finds."""
    segment = request.spec.segment
    return bool(segment["rule"] == number_of(QUOTA) and not segment["pooled"])


def later(request: Request, launch: Launch, index: int) -> Request | None:
    """A request as it will be after a single step that runs, apart from the tokens that this step commits.

    Arguments:
    - `launch`, `index`: the part that the step is, and the place of the request in it.

    Returns a copy, which waits for these tokens; `None` where the part leaves no tokens to others, and where
    the step may end the block.
    """
    if launch.left_from is None or not told_by_table(request) or request.steps_left < 2:
        return None
    masked = int(np.count_nonzero(request.tokens[: request.block.stop] == request.mask_id))
    if _committed(request, masked) >= masked:
        return None
    after, stored = copy.copy(request), launch.stored[index]
    after.steps, after.block_step = request.steps + 1, request.block_step + 1
    after.ready = time.perf_counter()
    if stored is not None:
        after.forwarded, after.stored = stored.forwarded, stored.rows
    first = launch.left_from + sum(map(len, launch.candidates[:index]))
    after.awaited = Awaited(launch.candidates[index], first)
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
