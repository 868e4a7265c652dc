"""What is kept of each request, and files of it."""

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from jdllm.errors import RequestError

Status = Literal["completed", "failed", "cancelled"]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
class Record:
    """One request.

    - `index`: its place in the order of arrival.
    - `scheduled`, `sent`, `ended`: seconds since the load began: when it was due, when it went out, and when
      its answer was there or it failed.
    - `prompt_tokens`: as the server counts them, or as they were sent where it did not answer.
    - `asked_tokens`, `completion_tokens`: tokens to generate, and those that the answer counts.
    - `status`, `error`: how it ended, and what it failed with.
    - `latency`: from when it was due to its end.
    - `time_to_first_text`, `time_to_first_block`: from when it was due, where a stream told.
    - `nfe`, `steps`: forward evaluations as the server counts them, and as the request says, where it does.
    """

    index: int
    scheduled: float
    sent: float
    ended: float
    prompt_tokens: int
    asked_tokens: int
    completion_tokens: int
    status: Status
    error: str | None
    latency: float
    time_to_first_text: float | None
    time_to_first_block: float | None
    finish_reason: str | None
    nfe: int | None
    steps: int | None


_RECORD = TypeAdapter(Record)


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write a JSON object a line, in order of arrival; the file is there whole or not at all.

    Raises `RequestError` where it cannot be written.
    """
    lines = [json.dumps(_rounded(record)) + "\n" for record in sorted(records, key=lambda r: r.index)]
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
        ) as file:
            file.writelines(lines)
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as e:
        raise RequestError(f"{path} cannot be written: {e.strerror}") from None


def check_writable(path: Path) -> None:
    """Raise `RequestError` where `write_records` could not write, before there is anything to lose."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise RequestError(f"{path} cannot be written: expected a file in a directory that can be")


def read_records(path: Path) -> list[Record]:
    """Read what `write_records` wrote; raises `RequestError`, which names the file and the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise RequestError(f"{path} cannot be read: {getattr(e, 'strerror', None) or e}") from None
    records = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            records.append(_RECORD.validate_json(line))
        except ValidationError as e:
            first = e.errors(include_url=False)[0]
            at = ".".join(map(str, first["loc"]))
            raise RequestError(
                f"{path}, line {number} is no record of a request: {at} {first['msg']}"
            ) from None
    if not records:
        raise RequestError(f"{path} has no records")
    return records


def _rounded(record: Record) -> dict[str, Any]:
    values = dataclasses.asdict(record)  # type: ignore[call-overload]
    return {k: round(v, 6) if isinstance(v, float) and math.isfinite(v) else v for k, v in values.items()}
