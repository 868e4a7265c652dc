"""What `jdllm plan --table` says of every way to generate, in each of some budgets."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jdllm.byte_sizes import format_bytes
from jdllm.cli.options import in_option_words
from jdllm.planning.plan import LONGEST
from jdllm.planning.question import StepQuestion
from jdllm.planning.step_time import format_seconds
from jdllm.planning.ways import PREFILLING, REQUESTS, Way

_HEAD = ("", "longest", "device", "at once", "takes", "host", "link", "cut")
_LEFT = (0, len(_HEAD) - 1)
_NONE = "-"


class Planned(NamedTuple):
    """A budget, and every way in it."""

    asked: StepQuestion
    ways: Sequence[Way]


def way_facts(planned: Sequence[Planned]) -> dict[str, Any]:
    """The tables as one JSON object."""
    asked = planned[0].asked
    budgets = [
        {
            "budget_bytes": one.budget.device,
            "host_budget_bytes": one.budget.host,
            "ways": [way._asdict() | {"options": dict(way.options)} for way in ways],
        }
        for one, ways in planned
    ]
    return {
        "target": asked.card.target,
        "dtype": asked.workload.dtype,
        "positions": asked.positions,
        "budgets": budgets,
    }


def describe_ways(planned: Sequence[Planned]) -> str:
    """A table for each budget, and what the columns are."""
    tables = [line for one in planned for line in (*_table(one), "")]
    return "\n".join([*tables, *_columns(planned[0].asked)])


def lacking(planned: Sequence[Planned]) -> str:
    """What does not fit, in words; empty where everything does."""
    missing = [
        f"{', '.join(way.name for way in ways if not way.fits)} in {format_bytes(asked.budget.device)}"
        for asked, ways in planned
        if not all(way.fits for way in ways)
    ]
    tokens = planned[0].asked.context
    what = "no context fits" if tokens is None else f"{tokens} tokens do not fit"
    return f"{what}: {'; '.join(missing)}" if missing else ""


def _table(planned: Planned) -> list[str]:
    asked, ways = planned
    budget = asked.budget
    head = f"{format_bytes(budget.device)} on {asked.card.target}, {format_bytes(budget.host)} of host memory"
    rows = [_HEAD, *map(_cells, ways)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if at in _LEFT else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [head, *lines, *_notes(asked, ways)]


def _cells(way: Way) -> tuple[str, ...]:
    counts = "/".join(str(way.at_once[tokens]) for tokens in REQUESTS) if way.at_once else _NONE
    known = way.name, _length(way.longest), _length(way.on_device), counts
    if not way.fits:
        return (*known, "does not fit", _NONE, _NONE, "")
    takes = format_seconds(way.seconds)
    return (
        *known,
        takes if way.measured else f"at least {takes}",
        format_bytes(way.host_bytes) if way.host_bytes else _NONE,
        format_seconds(way.link_seconds) if way.link_seconds else _NONE,
        ", ".join(way.cut),
    )


def _length(tokens: int) -> str:
    return {0: _NONE, LONGEST: "any"}.get(tokens, str(tokens))


def _notes(asked: StepQuestion, ways: Sequence[Way]) -> list[str]:
    """Options that ways need, and which context was prefilled."""
    needing: dict[str, list[Way]] = {}
    for way in ways:
        named = " ".join(in_option_words(f"{name}={value}") for name, value in way.options.items())
        if named:
            needing.setdefault(named, []).append(way)
    notes = [
        f"{', '.join(way.name for way in group)}: {group[0].context} tokens need {named}"
        for named, group in needing.items()
    ]
    return notes + [
        f"{way.name}: a question over {way.context} tokens"
        for way in ways
        if way.name == PREFILLING and way.fits and way.context not in (asked.context, way.longest)
    ]


def _columns(asked: StepQuestion) -> list[str]:
    """What the columns are."""
    config, tokens = asked.workload.config, "the longest context"
    if asked.context is not None:
        tokens = f"{asked.context} tokens"
    steps = "a full step, a refresh or a whole question"
    if config.in_parts:
        steps = f"a prompt, and {'a token' if config.in_order else 'an evaluation of a block'} behind it"
    return [
        f"longest: tokens; the model is made for {asked.positions}. device: the same without host memory",
        f"at once: requests of {' / '.join(map(str, REQUESTS))} tokens that run together",
        f"takes: {steps}, of {tokens}. link: transfers from host memory in this time",
        "cut: what is away in host memory, and into how many chunks operators are cut",
    ]
