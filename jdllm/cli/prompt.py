"""Where prompts come from."""

import itertools
import json
import sys
from pathlib import Path
from typing import NamedTuple

from jdllm.errors import RequestError

_SOURCES = "an argument, --file, --token-ids, --jsonl or standard input"
_BYTE_ORDER_MARK = "\ufeff"


class Prompts(NamedTuple):
    """Texts, or a list of ids for each prompt; the other is `None`."""

    texts: list[str] | None
    token_ids: list[list[int]] | None


class LongText(NamedTuple):
    """A question over a long context, as texts."""

    instruction: str
    context: str
    query: str


def read_long(context: Path | None, query: str | None, instruction: str | None, chat: bool) -> LongText:
    """Read a question over a long context.

    Arguments:
    - `context`: its file, or `-` for standard input.
    - `chat`: the chat template says what the instruction is.

    Raises `RequestError` where one of both is missing, and as `read_text` does.
    """
    if context is None or not query:
        missing = "--context FILE" if context is None else "--query TEXT"
        raise RequestError(f"a question over a long context needs {missing} too")
    if chat and instruction is not None:
        raise RequestError("with --chat the template is the instruction: leave --instruction out")
    text = read_text(None if str(context) == "-" else context, "the context", "--context")
    return LongText(instruction or "", text, query)


def read_prompts(arguments: list[str] | None, file: Path | None, token_ids: str | None) -> Prompts:
    """Read prompts from the one source that was given, else from standard input if that is no terminal.

    Arguments:
    - `arguments`: the texts themselves.
    - `file`: holds one text. One line break at the end is dropped, as for standard input.
    - `token_ids`: JSON, a list with one list of ids for each prompt.

    Raises `RequestError` for no source or several, an empty text, bytes that are not UTF-8, a file that
    cannot be read and ids of another form.
    """
    check_given_once({"an argument": arguments or None, "--file": file, "--token-ids": token_ids})
    if token_ids is not None:
        return Prompts(None, _parse_ids(token_ids))
    if arguments:
        texts = [_decode(text.encode(errors="surrogateescape"), "the prompt") for text in arguments]
    else:
        texts = [_without_line_end(read_text(file, "the prompt"))]
    if not all(texts):
        raise RequestError(f"the prompt is empty: give it by {_SOURCES}")
    return Prompts(texts, None)


def check_given_once(sources: dict[str, object]) -> None:
    """Refuse several sources of prompts; one that was not given is `None`."""
    names = [name for name, value in sources.items() if value is not None]
    if len(names) > 1:
        raise RequestError(f"the prompt is given by {' and '.join(names)}: give it once")


def read_text(file: Path | None, what: str, option: str = "--file") -> str:
    """The text of a file, or of standard input for `None` unless that is a terminal."""
    if file is not None:
        try:
            return _decode(file.read_bytes(), f"{option} {file}")
        except OSError as e:
            raise RequestError(f"{option} {file} cannot be read: {e.strerror}") from None
    if sys.stdin is None or sys.stdin.isatty():
        raise RequestError(f"no prompt: give {what} by {_SOURCES}")
    return _decode(sys.stdin.buffer.read(), "standard input")


def _decode(data: bytes, where: str) -> str:
    """Text of UTF-8, without the byte order mark that some editors put before it."""
    try:
        return data.decode().removeprefix(_BYTE_ORDER_MARK)
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
