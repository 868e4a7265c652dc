"""What an engine has to be asked for, so that it takes a request that has no room as the engine is."""

import contextlib
import dataclasses

from jdllm.errors import ConfigError, NoRoomError
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.planning.account import Account
from jdllm.planning.offloading import account_with_offloading
from jdllm.planning.room import Options, Room


def moved(account: Account, context: int) -> Account | None:
    """The same engine where it is asked for `max_context=context`, if layers are in host memory then.

    Returns `None` where nothing moves layers: without host memory, beside a verifier, and where somebody has
    asked for a `max_context` or `kv_pool` that says otherwise.
    """
    budget, sharing = account.budget, account.sharing
    if budget is None or not budget.host or account.verifier or sharing is None:
        return None
    if sharing.context is not None or sharing.asked_pages is not None:
        return None
    needs = sharing.needs
    with contextlib.suppress(ConfigError):
        found = account_with_offloading(
            dataclasses.replace(needs.config, offloaded=0),
            needs.dtype,
            budget,
            device=needs.device,
            max_num_batched_tokens=sharing.asked_rows,
            max_num_logits=needs.max_num_logits,
            max_context=context,
        )
        return found if found.offloaded else None
    return None


def moves_for(account: Account, room: Room) -> Account | None:
    """The engine that has the room because `max_context` moves layers; `None` where this does not help."""
    found = moved(account, room.rows)
    return found if found is not None and found.sharing is not None and room.is_in(found.sharing) else None


def check_room(account: Account, rows: int, pages: int) -> None:
    """Raise `NoRoomError` for a request with a cache that has no room, and say which options make it.

    Arguments:
    - `account`: of the engine.
    - `rows`: packed rows of the largest step of the request, as they are compiled.
    - `pages`: of the pool that the request needs at most.
    """
    if pages < account.pages and rows <= account.max_refresh:
        return
    lacks = f"has a step of {rows} rows, and at most {account.max_refresh} fit beside the KV pool"
    if pages >= account.pages:
        lacks = f"needs {pages} pages of the KV pool, which has {account.pages - 1}"
    options = _options(account, rows, pages)
    named = " and ".join(f"{name}={value!r}" for name, value in options.items())
    more = "" if "max_num_batched_tokens" in options else " or more"
    raise NoRoomError(f"a request {lacks}: set {named}{more}, or shorten its prompt or its generation")


def _options(account: Account, rows: int, pages: int) -> Options:
    """Options that make room for a request: more memory only where nothing else does."""
    room, sharing = Room(rows, pages * PAGE_ROWS), account.sharing
    if sharing is None:
        return {"kv_pool": (pages + 1) * account.page_bytes}
    # Only an engine that has moved layers can surely move more: a model may be in memory already.
    if account.offloaded and room.options_within(sharing) is None and moves_for(account, room) is not None:
        return {"max_context": rows}
    return room.options(sharing)


def helps_full_step(account: Account, rows: int) -> str | None:
    """The option that lets an engine with layers in host memory run a full step of so many rows; `None`
    where more memory alone does."""
    found = moved(account, rows) if account.offloaded else None
    return f"max_context={rows}" if found is not None and rows <= found.longest else None
