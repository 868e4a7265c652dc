"""What `jdllm plan` says of a causal model."""

from typing import Any

from jdllm.byte_sizes import format_bytes
from jdllm.cli.plan_parts import account_facts, account_lines, tokens_of
from jdllm.planning.account import Account
from jdllm.planning.causal import CausalPlan
from jdllm.planning.plan import Workload
from jdllm.planning.step_time import estimated


def causal_facts(account: Account, plan: CausalPlan) -> dict[str, Any]:
    """The plan as one JSON object."""
    facts = plan._asdict()
    if plan.layered is not None:
        facts["layered"] = plan.layered._asdict() | {"layering": plan.layered.layering._asdict()}
    return facts | account_facts(account)


def describe_causal(workload: Workload, account: Account, target: str, plan: CausalPlan) -> str:
    """Times and memory of a prompt and of the tokens behind it, and what the KV pool holds."""

    def tokens(count: int) -> str:
        return tokens_of(count, workload.config.max_positions)

    longest = [f"longest prompt: {tokens(plan.longest)} in the KV pool"]
    if plan.longest_layered:
        longest.append(f"layer by layer, with keys in host memory: {tokens(plan.longest_layered)}")
    return "\n".join(
        [
            f"{tokens(plan.prompt)} of prompt {'fit' if plan.fits else 'do not fit'} on {target}",
            *_times(workload, plan),
            "",
            *account_lines(account, target, plan.peak_bytes),
            *([f"host memory   {format_bytes(plan.host_bytes)}"] if plan.host_bytes else []),
            *longest,
        ]
    )


def _times(workload: Workload, plan: CausalPlan) -> list[str]:
    token = f"each token behind it takes {estimated(plan.token_seconds, plan.token_measured)} (estimate)"
    first = f"the first token after {estimated(plan.prefill_seconds, plan.prefill_measured)} (estimate)"
    if plan.layered is None:
        return [f"prefill: {plan.parts} parts of up to {plan.rows} tokens, {first}", f"decode: {token}"]
    layers, layering = workload.config.num_layers, plan.layered.layering
    lines = [
        f"prefill: layer by layer, {layering.chunk} rows at a time, {first}; keys of"
        f" {layers - layering.kept} of {layers} layers leave for host memory meanwhile",
    ]
    if plan.layered.back_bytes:
        lines.append(
            f"then {format_bytes(plan.layered.back_bytes)} come back, in"
            f" {estimated(plan.back_seconds, plan.prefill_measured)}"
        )
    passing = format_bytes(plan.layered.streamed_bytes)
    through = f", {passing} of keys pass through the device for each" if plan.layered.streamed_bytes else ""
    return [*lines, f"decode: {token}{through}"]
