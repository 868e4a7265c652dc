"""What `jdllm plan --prefilling` says of the stages of a long context."""

from typing import Any

from jdllm.byte_sizes import format_bytes
from jdllm.execution.paged.pool import PAGE_ROWS, pool_bytes
from jdllm.planning.plan import Workload
from jdllm.planning.prefilling import LongPlan, context_rows
from jdllm.planning.step_time import estimated, format_seconds


def stage_facts(plan: LongPlan) -> dict[str, Any]:
    """The stages as one JSON object."""
    return {
        "stages": [stage._asdict() for stage in plan.stages],
        "seconds": plan.seconds,
        "seconds_at_measured_rates": plan.measured,
        "fits": plan.lacking is None,
        "weights_bytes": plan.account.weights,
        "request_pages": plan.pages,
        "context_pages": context_rows(plan.prefilling, plan.question) // PAGE_ROWS,
        "pool_pages": plan.account.pages - 1,
        "peak_bytes": plan.peak_bytes,
    }


def describe_stages(plan: LongPlan) -> str:
    """A table of the stages, and what of the pool they need."""
    account, question = plan.account, plan.question
    rows = [("stage", "evaluations", "rows", "temporaries", "seconds")]
    rows += [
        (s.name, str(s.evaluations), str(s.rows), format_bytes(s.step_bytes), format_seconds(s.seconds))
        for s in plan.stages
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(cell.ljust(width) if not i else cell.rjust(width) for i, (cell, width) in enumerate(line))
        for line in ([*zip(row, widths, strict=True)] for row in rows)
    ]
    context, request = context_rows(plan.prefilling, question), plan.stages[-2].stored_rows
    fits = context + request <= (account.pages - 1) * PAGE_ROWS
    again = "are kept for the next question" if fits else "do not fit: each question encodes them again"
    return "\n".join(
        [
            f"{question.context} tokens of context, {question.gen_length} of answer on {plan.target}:"
            f" {estimated(plan.seconds, plan.measured)} (estimate)",
            "",
            *table,
            "",
            f"weights {format_bytes(account.weights)}, peak {format_bytes(plan.peak_bytes)}",
            f"KV pool: {request // PAGE_ROWS} pages of {account.pages - 1} for a request,"
            f" {format_bytes(_bytes(plan.workload, request))}",
            f"keys of the whole context: {context // PAGE_ROWS} pages,"
            f" {format_bytes(_bytes(plan.workload, context))}; they {again}",
        ]
    )


def _bytes(workload: Workload, rows: int) -> int:
    return pool_bytes(workload.config, workload.dtype, rows // PAGE_ROWS, PAGE_ROWS)
