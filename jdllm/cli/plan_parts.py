"""What `jdllm plan` says of an engine whose prompts are read in parts."""

from typing import Any

from jdllm.byte_sizes import format_bytes
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.planning.account import Account
from jdllm.planning.step_time import RATES, estimated

_REQUESTS = (1024, 4096, 16384, 131072)


def account_facts(account: Account) -> dict[str, Any]:
    """The engine's memory, for a JSON object."""
    return {
        "weights_bytes": account.weights,
        "largest_step_bytes": account.largest_step,
        "pool_pages": account.pages - 1,
        "pool_bytes": account.pool_bytes,
        "offloaded_layers": account.offloaded,
        "streamed_weights_bytes": account.streamed,
    }


def account_lines(account: Account, target: str, peak: int) -> list[str]:
    """The engine's memory, and what the KV pool holds.

    Arguments:
    - `target`: the name of the card.
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
        *([streamed_line(account, target)] if account.offloaded else []),
    ]


def streamed_line(account: Account, target: str) -> str:
    """What every step moves to the device, however many requests it has."""
    rates = RATES[target]
    taking = estimated(account.streamed / rates.host_bytes, rates.measured)
    return (
        f"weights of {account.offloaded} layers are in host memory: each step moves"
        f" {format_bytes(account.streamed)} for all of its requests together, in {taking}"
    )


def tokens_of(count: int, positions: int) -> str:
    """So many tokens, and whether the model has positions for them."""
    return f"{count} tokens" + (
        f" (beyond the {positions} positions of the model)" if count > positions else ""
    )
