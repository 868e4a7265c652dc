"""What `jdllm plan` says of a block model."""

from typing import Any

from jdllm.byte_sizes import format_bytes
from jdllm.cli.plan_parts import account_facts, account_lines, tokens_of
from jdllm.planning.account import Account
from jdllm.planning.blocks import BlocksPlan
from jdllm.planning.plan import Workload
from jdllm.planning.step_time import estimated, format_seconds


def block_facts(account: Account, plan: BlocksPlan, adapter: int) -> dict[str, Any]:
    """The plan as one JSON object; `adapter` are bytes of an adapter for drafts."""
    return plan._asdict() | account_facts(account) | {"adapter_bytes": adapter}


def describe_blocks(workload: Workload, account: Account, target: str, plan: BlocksPlan, adapter: int) -> str:
    """Times and memory of a prompt and of the blocks behind it, and what the KV pool holds.

    Arguments:
    - `adapter`: bytes of an adapter for drafts, which is part of the overhead.
    """
    positions = workload.config.max_positions
    prompt, read = tokens_of(plan.prompt, positions), format_bytes(int(plan.evaluation_bytes))
    first = estimated(plan.prefill_seconds, plan.measured)
    return "\n".join(
        [
            f"{prompt} of prompt {'fit' if plan.fits else 'do not fit'} on {target}",
            f"prefill: {plan.parts} parts of up to {plan.rows} tokens, the first block begins after {first}"
            " (estimate)",
            f"an evaluation of a block of {plan.block_length} behind it reads {read}:"
            f" at least {format_seconds(plan.evaluation_seconds)}",
            "",
            *([f"adapter       {format_bytes(adapter)}"] if adapter else []),
            *account_lines(account, target, plan.peak_bytes),
            f"longest prompt: {tokens_of(plan.longest, positions)}",
        ]
    )
