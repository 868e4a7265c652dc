"""What `jdllm plan --prefilling` says of the stages of a long context."""

from collections.abc import Sequence
from typing import Any

from jdllm.byte_sizes import format_bytes
from jdllm.decoding.prefilling import Prefilling
from jdllm.execution.paged.pool import PAGE_ROWS, pool_bytes
from jdllm.planning.account import Account
from jdllm.planning.plan import Workload
from jdllm.planning.prefilling import Question, StagePlan, context_rows, lacking, measured
from jdllm.planning.step_time import estimated, format_seconds


def stage_facts(
    workload: Workload,
    account: Account,
    target: str,
    prefilling: Prefilling,
    question: Question,
    stages: Sequence[StagePlan],
) -> dict[str, Any]:
    """The stages as one JSON object."""
    kept = context_rows(prefilling, question)
    return {
        "stages": [stage._asdict() for stage in stages],
        "seconds": sum(stage.seconds for stage in stages),
        "seconds_at_measured_rates": measured(workload, target),
        "fits": lacking(account, stages) is None,
        "weights_bytes": account.weights,
        "request_pages": sum(stage.stored_rows for stage in stages if stage.name == "build") // PAGE_ROWS,
        "context_pages": kept // PAGE_ROWS,
        "pool_pages": account.pages - 1,
        "peak_bytes": _peak(workload, account, stages),
    }


def describe_stages(
    workload: Workload,
    account: Account,
    target: str,
    prefilling: Prefilling,
    question: Question,
    stages: Sequence[StagePlan],
) -> str:
    """A table of the stages, and what of the pool they need."""
    seconds = sum(stage.seconds for stage in stages)
    rows = [("stage", "evaluations", "rows", "temporaries", "seconds")]
    rows += [
        (s.name, str(s.evaluations), str(s.rows), format_bytes(s.step_bytes), format_seconds(s.seconds))
        for s in stages
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(cell.ljust(width) if not i else cell.rjust(width) for i, (cell, width) in enumerate(line))
        for line in ([*zip(row, widths, strict=True)] for row in rows)
    ]
    context, request = context_rows(prefilling, question), stages[-2].stored_rows
    fits = context + request <= (account.pages - 1) * PAGE_ROWS
    again = "are kept for the next question" if fits else "do not fit: each question encodes them again"
    return "\n".join(
        [
            f"{question.context} tokens of context, {question.gen_length} of answer on {target}:"
            f" {estimated(seconds, measured(workload, target))} (estimate)",
            "",
            *table,
            "",
            f"weights {format_bytes(account.weights)}, peak {format_bytes(_peak(workload, account, stages))}",
            f"KV pool: {request // PAGE_ROWS} pages of {account.pages - 1} for a request,"
            f" {format_bytes(_bytes(workload, request))}",
            f"keys of the whole context: {context // PAGE_ROWS} pages,"
            f" {format_bytes(_bytes(workload, context))}; they {again}",
        ]
    )


def _peak(workload: Workload, account: Account, stages: Sequence[StagePlan]) -> int:
    overhead = 0 if account.budget is None else account.budget.overhead
    return account.weights + overhead + account.pool_bytes + max(stage.step_bytes for stage in stages)


def _bytes(workload: Workload, rows: int) -> int:
    return pool_bytes(workload.config, workload.dtype, rows // PAGE_ROWS, PAGE_ROWS)
