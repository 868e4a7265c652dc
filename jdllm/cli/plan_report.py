"""What `jdllm plan` says of a step and of the longest contexts: in words, in JSON and as a picture."""

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import jax

from jdllm.byte_sizes import format_bytes
from jdllm.cli.options import as_option, in_option_words
from jdllm.cli.plan_parts import streamed_line
from jdllm.errors import ConfigError
from jdllm.planning.account import Account
from jdllm.planning.answer import Report, room_of
from jdllm.planning.budget import CUDA_CONTEXT, GUARD
from jdllm.planning.checks.compiler import compiler_temp_bytes
from jdllm.planning.layered import LayeredPlan
from jdllm.planning.plan import Workload
from jdllm.planning.question import Longest
from jdllm.planning.report import Frame, format_peak_table, timeline
from jdllm.planning.room import longest_request
from jdllm.planning.search import search
from jdllm.planning.sharing import pages_of
from jdllm.planning.step_time import RATES, estimated, format_seconds
from jdllm.planning.templates import step_template
from jdllm.planning.tier_template import tier_template

_REQUESTS = (1024, 4096, 16384)


def compiled_bytes(report: Report) -> int | None:
    """Bytes that the compiler allots to the activations, or `None` where it cannot be asked."""
    # A card that happens to be here is not needed: JAX would reserve most of its memory.
    jax.config.update("jax_platforms", "cpu")
    logging.getLogger("absl").setLevel(logging.ERROR)
    return compiler_temp_bytes(report.workload, report.plan, report.card.target)


def facts(report: Report, compiled: int | None) -> dict[str, Any]:
    """The report as one JSON object."""
    found, activation = report.plan, report.plan.activation
    estimate, layered = report.time, report.layered
    peak = found.peak_bytes if layered is None else max(layered.prompt_bytes, layered.token_bytes)
    return {
        "target": report.card.target,
        "card": report.card.name,
        "cache_policy": report.workload.cache_policy,
        "dtype": report.workload.dtype,
        "fits": report.refusal is None,
        "context": found.context,
        "rows": found.rows,
        "head_rows": found.head_rows,
        "positions": report.positions,
        "budget_bytes": report.budget.device,
        "needed_bytes": peak if report.refusal is None else report.refusal.needed_bytes,
        "peak_bytes": peak,
        "weights_bytes": found.weights_bytes,
        "kv_pool_bytes": found.kv_pool_bytes,
        "verifier_bytes": report.question.verifier,
        "overhead_bytes": report.question.overhead,
        "batch_bytes": found.batch_bytes,
        "activation_peak_bytes": activation.peak_bytes,
        "peak_op": activation.peak_op,
        "peak_to_average": activation.peak_to_average,
        "chunks": dataclasses.asdict(found.chunks),
        "host_tiers": found.host_tiers,
        "host_bytes": report.host_bytes,
        "host_budget_bytes": report.budget.host,
        "offloaded_layers": 0 if report.engine is None else report.engine.offloaded,
        "streamed_bytes": found.streamed_bytes,
        "stop_reason": report.stop_reason,
        "step_seconds": estimate.seconds,
        "step_seconds_at_measured_rate": estimate.measured,
        "plan_seconds": found.seconds,
        "options": dict(report.options),
        "layered": None if layered is None else layered._asdict() | {"layering": layered.layering._asdict()},
        "max_context": report.longest.context,
        "max_context_step_seconds": report.longest.seconds,
        "max_context_without_host_tiers": report.on_device.context,
        "max_context_without_host_tiers_step_seconds": report.on_device.seconds,
        "compiler_peak_bytes": None if compiled is None else found.fixed_bytes + compiled,
        "engine": None if report.engine is None else _engine_facts(report.workload, report.engine),
    }


def _engine_facts(workload: Workload, account: Account) -> dict[str, Any]:
    return {
        "rows": account.rows,
        "largest_step_bytes": account.largest_step,
        "kv_pool_pages": account.pages,
        "kv_pool_bytes": account.pool_bytes,
        "cached_requests": {str(tokens): count for tokens, count in _held(workload, account).items()},
        "max_context": account.max_context,
        "max_cached_context": _longest_cached(workload, account),
        "max_context_without_pool": account.longest,
    }


def _held(workload: Workload, account: Account) -> dict[int, int]:
    """How many requests of so many tokens the KV pool holds, for some numbers of tokens."""
    cached = _with_cache(workload)
    held = {}
    for tokens in _REQUESTS:
        pages = pages_of(cached.stored_rows(tokens))
        held[tokens] = (account.pages - 1) // pages if tokens <= account.max_refresh else 0
    return held


def _with_cache(workload: Workload) -> Workload:
    return workload if workload.caches else dataclasses.replace(workload, cache_policy="dual")


def _longest_cached(workload: Workload, account: Account) -> int:
    """Tokens of the longest request with a cache that an engine takes."""
    cached = _with_cache(workload)

    def taken(rows: int) -> bool:
        return account.sharing is not None and room_of(cached, rows).is_in(account.sharing)

    return longest_request(taken) if account.pages > 1 else 0


def describe(report: Report) -> str:
    """The verdict, where the bytes go, how the step is cut, and the tensors at the peak."""
    if report.layered is not None:
        return _layer_by_layer(report, report.layered)
    found, verifier = report.plan, report.question.verifier
    account = {
        "weights": format_bytes(found.weights_bytes),
        **({"verifier": format_bytes(verifier)} if verifier else {}),
        "KV pool": format_bytes(found.kv_pool_bytes),
        "overhead": format_bytes(found.budget.overhead - verifier),
        "batch": format_bytes(found.batch_bytes),
        "activations": format_bytes(found.activation.peak_bytes),
        "host memory": format_bytes(found.host_bytes),
    }
    notes = {
        "overhead": f"CUDA context and libraries {format_bytes(CUDA_CONTEXT)},"
        f" kept free for gaps in XLA's pool {format_bytes(GUARD)}",
        "host memory": f"of {format_bytes(report.budget.host)}",
    }
    chunks = ", ".join(f"{name} {count}" for name, count in dataclasses.asdict(found.chunks).items())
    tiers = "none"
    if found.tiers is not None:
        tiers = f"{', '.join(found.host_tiers)} ({found.tiers.chunk_rows} rows at a time)"
    elif report.engine is not None and found.streamed_bytes:
        tiers = (
            f"weights of {report.engine.offloaded} of {report.workload.config.num_layers} layers,"
            f" {format_bytes(found.streamed_bytes)} in every step"
        )
    lines = [
        *_verdict(report),
        f"a full step takes {report.time}",
        "",
        *[f"{name:<12}{size:>12}  {notes.get(name, '')}".rstrip() for name, size in account.items()],
        "",
        f"chunks: {chunks}",
        f"host tiers: {tiers}",
        "",
        format_peak_table(found.activation),
        "",
    ]
    return "\n".join(lines)


def _layer_by_layer(report: Report, layered: LayeredPlan) -> str:
    """The verdict of a request that the pool cannot hold, and where its keys are."""
    layers, layering, target = report.workload.config.num_layers, layered.layering, report.card.target
    rates = RATES[target]
    passing = estimated(layered.streamed_bytes / rates.host_bytes, rates.measured)
    context, device = _tokens(report, report.plan.context), max(layered.prompt_bytes, layered.token_bytes)
    lines = [
        f"fits on {target}, layer by layer: {context} need {format_bytes(device)} of the device's"
        f" {format_bytes(report.budget.device)} and {format_bytes(report.host_bytes)} of"
        f" {format_bytes(report.budget.host)} host memory",
        f"a refresh takes {report.time}",
        f"{layering.chunk} rows of a layer at a time; keys of {layers - layering.kept} of {layers} layers"
        " leave for host memory meanwhile",
        f"then {format_bytes(layered.back_bytes)} come back, and {format_bytes(layered.streamed_bytes)} pass"
        f" through the device in every other step, in {passing}",
    ]
    return "\n".join([*lines, ""])


def _verdict(report: Report) -> list[str]:
    found, available = report.plan, format_bytes(report.budget.device)
    beyond = _beyond(report, found.context)
    if report.refusal is None:
        peak = format_bytes(found.peak_bytes)
        need = f"{found.context} tokens{beyond} need {peak} of the device's {available}"
        if found.host_bytes:
            need += f" and {format_bytes(found.host_bytes)} of {format_bytes(report.budget.host)} host memory"
        named = [in_option_words(f"{name}={value}") for name, value in report.options.items()]
        asked = "".join(f", with {option}" for option in named)
        return [f"fits on {report.card.target}: {need}{asked}"]
    return [
        f"does not fit on {report.card.target}: {found.context} tokens{beyond} need at least"
        f" {format_bytes(report.refusal.needed_bytes, math.ceil)} of the device's {available}:"
        " the plan below is for that"
    ]


def compared(report: Report, compiled: int | None, asked: bool) -> str:
    """The predicted activations beside those of the compiler, and the longest contexts."""
    planned = report.plan.activation.peak_bytes
    longest = [f"longest context: {_longest(report, report.longest)}"]
    if report.longest != report.on_device:
        longest.append(f"longest context without host memory: {_longest(report, report.on_device)}")
    if report.layered is not None:
        return "\n".join(longest)
    if compiled is not None:
        compiler = f"{format_bytes(compiled)} (plan {planned / compiled - 1:+.1%})"
    elif not asked:
        compiler = "not checked"
    elif report.plan.tiers is not None:
        compiler = "not checked (with host tiers the step is many executables)"
    else:
        compiler = "not checked (needs the cuda13 or the cuda12 extra)"
    lines = [f"predicted peak of activations: {format_bytes(planned)}", f"compiler: {compiler}"]
    return "\n".join([*lines, *longest])


def describe_engine(report: Report) -> str:
    """The largest step of an engine in this budget, what its KV pool holds, and its longest contexts."""
    account = report.engine
    if account is None:
        return "LLM in this budget: no step fits"
    counts = _held(report.workload, account).items()
    held = [f"{count} of {tokens}" for tokens, count in counts if count] or ["none of 1024"]
    policy = report.workload.cache_policy if report.workload.caches else "dual"
    lines = [
        f"LLM in this budget: steps of up to {account.rows} rows, the largest"
        f" {format_bytes(account.largest_step)}",
        f"KV pool: {account.pages} pages, {format_bytes(account.pool_bytes)}: requests of so many tokens:"
        f" {', '.join(held)} (cache {policy})",
        f"longest request with a cache ({as_option('max_context')} asks for more):"
        f" {_tokens(report, _longest_cached(report.workload, account))}",
        f"longest context beside the pool: {_tokens(report, account.max_context)}",
        f"longest context once the pool is given up: {_tokens(report, account.longest)}",
    ]
    if account.offloaded:
        lines.append(streamed_line(account, report.card.target))
    return "\n".join(lines)


def _longest(report: Report, longest: Longest) -> str:
    if not longest.context:
        return "none fits"
    return f"{_tokens(report, longest.context)}, {format_seconds(longest.seconds)} a step"


def _tokens(report: Report, context: int) -> str:
    return f"{context} tokens{_beyond(report, context)}"


def _beyond(report: Report, context: int) -> str:
    return f" (beyond the {report.positions} positions of the model)" if context > report.positions else ""


def draw(report: Report, path: Path, memory: str | None) -> None:
    """The timeline of the plan below that of the same step with nothing cut; `memory` as it was typed."""
    if report.layered is not None:
        raise ConfigError(
            "--plot draws a step that runs at once, and this one runs layer by layer: leave it out"
        )
    workload, found, verifier = report.workload, report.plan, report.question.verifier
    config, kind, dims = workload.config, workload.kind, {"T": found.rows, "M": found.head_rows}
    template = step_template(config, kind)
    if found.tiers is not None:
        template = tier_template(config, kind, found.tiers, found.rows, workload.dtype)
    available = max(0, found.budget.device - found.fixed_bytes)
    whole = search(template, dims, dict.fromkeys(found.activation.counts, (1,)), available)
    resident = {
        "weights": found.weights_bytes,
        "verifier": verifier,
        "KV pool": found.kv_pool_bytes,
        "overhead, batch": found.budget.overhead - verifier + found.batch_bytes,
    }
    frame = Frame(
        f"{config.family}: one step of {found.context} tokens in {workload.dtype} on {report.card.target}",
        report.budget.device,
        format_bytes(report.budget.device) if memory is None else memory.strip(),
        {name: size for name, size in resident.items() if size},
    )
    timeline(whole, found.activation, path, frame)
