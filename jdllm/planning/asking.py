"""What an engine has to be asked for, so that it takes a request that has no room as the engine is."""

import contextlib
import dataclasses
from typing import NamedTuple

from jdllm.errors import ConfigError, NoRoomError
from jdllm.execution.offload.placement import device_weight_bytes
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.planning.account import Account
from jdllm.planning.ladder import DEFAULT_ROWS
from jdllm.planning.offloading import account_with_offloading
from jdllm.planning.room import Options, Room, in_option
from jdllm.planning.sharing import pages_of


class Moved(NamedTuple):
    """An engine with layers in host memory, and what has to be asked for so that `LLM` makes this engine."""

    engine: Account
    options: Options


def moves_for(account: Account, room: Room) -> Moved | None:
    """What takes a request because layers move to host memory for it; `None` where this does not help.

    A `max_context` moves layers where full steps of it would not run beside them all, or where these leave
    too little room for a usual context. Otherwise a `kv_pool` does that would not fit beside them all.
    """
    for pages in _pools(account, room):
        pool = None if pages is None else pages * account.page_bytes
        found = moved_engine(account, room.rows, pool)
        if found is not None and found.sharing is not None and room.is_in(found.sharing):
            options: Options = {"max_context": room.rows}
            return Moved(found, options if pool is None else {**options, "kv_pool": in_option(pool)})
    return None


def could_move(account: Account, roomiest: Account, room: Room, *, tight: bool) -> bool:
    """Whether `moves_for` finds an engine, told without making it.

    Arguments:
    - `roomiest`: the engine that has as many layers in host memory as it can.
    - `tight`: whether beside all layers there is too little room for a usual context, so that any other
      context that is asked for moves layers.
    """
    here, most = account.sharing, roomiest.sharing
    if here is None or most is None:
        return False
    for pages in _pools(account, room):
        there = dataclasses.replace(most, context=room.rows, asked_pages=pages)
        moves = tight or account.offloaded > 0 or pages is not None or room.rows > here.longest(1)
        if moves and room.is_in(there) and there.needs.fits_on_device(room.rows, there.beside(pages or 1)):
            return True
    return False


def _pools(account: Account, room: Room) -> tuple[int | None, ...]:
    """Pages of the pool that may be asked for: `None` for as many as there is room for, then as many as by
    default a pool beside moved layers has at least, and then no more than the request needs.

    A number of pages is always one that does not fit beside all layers.
    """
    sharing = account.sharing
    if sharing is None:
        return (None,)
    rows, needs = sharing.asked_rows or DEFAULT_ROWS[0], sharing.needs
    whole = dataclasses.replace(sharing, weights=device_weight_bytes(needs.config, needs.dtype, 0))
    fitting = max(0, (whole if account.offloaded else sharing).left(rows)) // account.page_bytes
    # A smaller pool than for a quarter of the rows does not ask for refreshes of them all.
    least = max(room.pages, fitting + 1, 1 + pages_of(room.rows // 4))
    return (None, *sorted({least, max(least, 1 + pages_of(rows))}, reverse=True))


def moved_engine(account: Account, context: int, kv_pool: int | None = None) -> Account | None:
    """The same engine where it is asked for so long a context, and a pool of so many bytes; `None` where no
    layers are in host memory then.

    So it is without host memory, and where somebody has asked for a context or a pool that says otherwise.
    """
    budget, sharing = account.budget, account.sharing
    if budget is None or not budget.host or sharing is None:
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
            kv_pool=kv_pool,
            verifier_bytes=account.verifier,
        )
        return found if found.offloaded else None
    return None


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
    moved = moves_for(account, room) if account.offloaded and room.options_within(sharing) is None else None
    return room.options(sharing) if moved is None else moved.options


def helps_full_step(account: Account, rows: int) -> str | None:
    """The option that lets an engine with layers in host memory run a full step of so many rows; `None`
    where more memory alone does."""
    found = moved_engine(account, rows) if account.offloaded else None
    return f"max_context={rows}" if found is not None and rows <= found.longest else None
