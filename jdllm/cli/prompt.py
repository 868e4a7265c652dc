"""Where a prompt comes from."""

import itertools
import json
import sys
from pathlib import Path
from typing import NamedTuple

from jdllm.errors import RequestError

_SOURCES = "an argument, --file, --token-ids or standard input"


class Prompt(NamedTuple):
    """One text, or a list of ids for each prompt; the other is `None`."""

    text: str | None
    token_ids: list[list[int]] | None


def read_prompt(argument: str | None, file: Path | None, token_ids: str | None) -> Prompt:
    """Read the prompt from the one source that was given, else from standard input if that is no terminal.

    Arguments:
    - `argument`: the text itself.
    - `file`: holds the text. One line break at the end is dropped, as for standard input.
    - `token_ids`: JSON, a list with one list of ids for each prompt.

    Raises `RequestError` for no source or several, an empty text, bytes that are not UTF-8, a file that
    cannot be read and ids of another form.
    """
    given = {"an argument": argument, "--file": file, "--token-ids": token_ids}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise RequestError(f"the prompt is given by {' and '.join(names)}: give it once")
    if token_ids is not None:
        return Prompt(None, _parse_ids(token_ids))
    if argument is not None:
        text = _decode(argument.encode(errors="surrogateescape"), "the prompt")
    elif file is not None:
        text = _without_line_end(_decode(_read(file), f"--file {file}"))
    elif sys.stdin is not None and not sys.stdin.isatty():
        text = _without_line_end(_decode(sys.stdin.buffer.read(), "standard input"))
    else:
        raise RequestError(f"no prompt: give it by {_SOURCES}")
    if not text:
        raise RequestError(f"the prompt is empty: give it by {_SOURCES}")
    return Prompt(text, None)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as e:
        raise RequestError(f"--file {file} cannot be read: {e.strerror}") from None


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise RequestError(f"{where} is not UTF-8 text (byte {e.start})") from None


def _without_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _parse_ids(text: str) -> list[list[int]]:
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise RequestError(f"--token-ids is not JSON ({e}): expected such as [[5,6,7]]") from None
    if not isinstance(ids, list) or not ids or not all(isinstance(row, list) for row in ids):
        raise RequestError(
            "--token-ids must be a list with one list of ids for each prompt, such as [[5,6,7]]"
        )
    for x in itertools.chain.from_iterable(ids):
        if not isinstance(x, int) or isinstance(x, bool):
            raise RequestError(f"--token-ids holds {json.dumps(x)}: every id must be an integer")
    return ids
