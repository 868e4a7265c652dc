"""What `jdllm plan` says of an engine whose prompts are read in parts."""

from typing import Any

from jdllm.byte_sizes import format_bytes
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.planning.account import Account

_REQUESTS = (1024, 4096, 16384, 131072)


def account_facts(account: Account) -> dict[str, Any]:
    """The engine's memory, for a JSON object."""
    return {
        "weights_bytes": account.weights,
        "largest_step_bytes": account.largest_step,
        "pool_pages": account.pages - 1,
        "pool_bytes": account.pool_bytes,
    }


def account_lines(account: Account, peak: int) -> list[str]:
    """The engine's memory, and what the KV pool holds.

    Arguments:
    - `peak`: bytes of the device.
    """
    pages = account.pages - 1
    held = [f"{pages // -(-count // PAGE_ROWS)} of {count}" for count in _REQUESTS]
    return [
        f"weights       {format_bytes(account.weights)}",
        f"largest step  {format_bytes(account.largest_step)}",
        f"KV pool       {format_bytes(account.pool_bytes)}: {pages} pages of {PAGE_ROWS} tokens; requests"
        f" of so many tokens: {', '.join(held)}",
        f"peak          {format_bytes(peak)}, overhead included",
    ]


def tokens_of(count: int, positions: int) -> str:
    """So many tokens, and whether the model has positions for them."""
    return f"{count} tokens" + (
        f" (beyond the {positions} positions of the model)" if count > positions else ""
    )
