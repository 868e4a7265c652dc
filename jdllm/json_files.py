"""JSON files that somebody else wrote: a reader gets an object, or one line that says why not."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jdllm.errors import CheckpointError, JdllmError


def read_object(path: Path, error: type[JdllmError] = CheckpointError) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Arguments:
    - `path`: the file, UTF-8.
    - `error`: the class of errors to raise.

    Returns the object. A number beyond the range of a float is infinite, however it is written.

    Raises `error`, naming the file, where it cannot be read, is no JSON, nests too deeply, has a key twice in
    one object, or holds something else than an object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise error(f"{path} cannot be read: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise error(f"{path} is not readable as JSON: it is no UTF-8 text ({e})") from None
    return parse_object(text, path, error)


def parse_object(text: str | bytes, path: Path, error: type[JdllmError] = CheckpointError) -> dict[str, Any]:
    """As `read_object`, of text that was already read from `path`."""
    try:
        values = json.loads(text, parse_int=_integer, object_pairs_hook=_object)
    except RecursionError:
        raise error(f"{path} is not readable as JSON: it nests too deeply") from None
    except ValueError as e:
        raise error(f"{path} is not readable as JSON: {e}") from None
    if not isinstance(values, dict):
        raise error(f"{path} holds a {type(values).__name__}: expected a JSON object")
    return values


def numbered_lines(path: Path, error: type[JdllmError] = CheckpointError) -> Iterator[tuple[int, str]]:
    """The lines of a file of JSON lines that are not blank, each with its number.

    Arguments:
    - `path`: the file, UTF-8.
    - `error`: the class of errors to raise.

    Raises `error`, naming the file, where it cannot be read or is no text.
    """
    try:
        # A text may hold other line breaks than the file's own, which do not end a line of JSON.
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as e:
        raise error(f"{path} cannot be read: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise error(f"{path} is no UTF-8 text ({e})") from None


def _integer(text: str) -> int | float:
    """Python refuses to read very long integers and to convert long ones to floats; both end here."""
    number = float(text)
    return int(text) if math.isfinite(number) else number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return values
