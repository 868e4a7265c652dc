"""Requests, batches and engines for tests that build them without `LLM`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jdllm.compiling.executables import Executables
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, tree_bytes
from jdllm.pallas.device import CPU
from jdllm.planning.account import make_account
from jdllm.planning.budget import Budget
from jdllm.planning.ladder import Entry, bucket_entry
from jdllm.serving.build import make_engine
from jdllm.serving.engine import Engine, Updates
from jdllm.serving.packing import Packed, demand, pack
from jdllm.serving.request import Request
from jdllm.serving.spec import generation_spec, infill_spec
from jdllm.serving.updates import Ended, StepUpdate


def generation_request(index: int, *args: Any, **options: Any) -> Request:
    return Request(generation_spec(*args, **options), index)


def infill_request(index: int, *args: Any, **options: Any) -> Request:
    return Request(infill_spec(*args, **options), index)


def entry_of(requests: Sequence[Request]) -> Entry:
    """The sizes of a bucket that holds these requests' whole sequences."""
    rows, head_rows = (sum(column) for column in zip(*map(demand, requests), strict=True))
    return bucket_entry(rows, head_rows, len(requests))


def pack_all(requests: Sequence[Request], config: ModelConfig) -> Packed:
    return pack(requests, config, entry_of(requests))


def engine_of(
    params: Params,
    config: ModelConfig,
    executables: Executables,
    rows: int,
    *,
    budget: Budget | None = None,
    pages: int | None = None,
    max_context: int | None = None,
    **options: Any,
) -> Engine:
    """An engine of at most `rows` packed rows.

    Arguments:
    - `pages`, `max_context`: instead of those of the account, as of `Account`.
    """
    account = make_account(
        config,
        params["final_norm"].dtype.name,
        budget,
        device=CPU,
        max_num_batched_tokens=rows,
        weights_bytes=tree_bytes(params),
    )
    given = {"pages": pages, "max_context": max_context}
    account = dataclasses.replace(account, **{name: x for name, x in given.items() if x is not None})
    return make_engine(params, config, executables, account, **options)


def finish(
    engine: Engine, requests: Sequence[Request], *, updates: Updates = "later"
) -> tuple[list[StepUpdate], list[Request]]:
    """Run what `requests` ask for to their end: the updates, and the requests as they ended."""
    told, states = [], {}
    for update in engine.run([request.spec for request in requests], updates=updates):
        if isinstance(update, Ended):
            if update.error is not None:
                raise update.error
            states[update.request] = update.state
        else:
            told.append(update)
    return told, [states[i] for i in range(len(requests))]
