"""Prompts as JSON lines: one object each, with sampling parameters of its own where it names some.

Any other key is the user's, and comes back in the line's answer.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from jdllm.arguments import resembling
from jdllm.checkpoints.conversation import Rendering
from jdllm.cli.options import option_names
from jdllm.cli.rendering import NAMES
from jdllm.cli.report import LineError
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError

if TYPE_CHECKING:
    from jdllm.llm import LLM
    from jdllm.outputs import RequestOutput

_KINDS = ("prompt", "prompt_token_ids", "messages")
ANSWERED = (
    *("text", "token_ids", "finish_reason", "nfe", "timings", "committed_in", "num_cached_tokens"),
    *("history", "outputs", "top_logprobs"),
)
"""Keys of an answer that are neither of a prompt nor of its parameters."""


class Line(NamedTuple):
    """One prompt.

    - `number`: of its line.
    - `kind`, `value`: the key that holds it, and what is there.
    - `fields`: sampling parameters by name.
    - `rendering`: of messages: fields of `Rendering` by name.
    - `kept`: keys that come back with the answer.
    """

    number: int
    kind: str
    value: Any
    fields: dict[str, Any]
    rendering: dict[str, Any]
    kept: dict[str, Any]


def read_lines(text: str) -> list[Line]:
    """Read the lines that are not blank; `LineError` for no object, or one without exactly one prompt."""
    lines = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        with _naming(number):
            lines.append(_read(number, line))
    if not lines:
        raise RequestError('--jsonl has no line: expected such as {"prompt": "1+1="}')
    return lines


def generate_lines(
    llm: "LLM",
    lines: list[Line],
    defaults: SamplingParams,
    rendering: dict[str, Any],
    *,
    parse_special: bool,
) -> list["RequestOutput"]:
    """An output for each line, all in one batch.

    Arguments:
    - `defaults`, `rendering`: what applies where a line does not name a parameter, or how its messages are
      rendered.
    - `parse_special`: whether special tokens in `prompt` become their ids.

    Raises `LineError` for what a line cannot ask, before anything runs.
    """
    prompts, sampling = [], []
    for line in lines:
        with _naming(line.number):
            sampling.append(defaults.changed(**line.fields))
            prompts.append(_prompt(llm, line, rendering))
    try:
        return llm.generate(prompts, sampling, parse_special=parse_special, progress=True)
    except RequestError as e:
        # The library counts prompts from 0, and does not where there is only one.
        named = re.fullmatch(r"(?:prompt (\d+): )?(.*)", str(e), re.DOTALL)
        index = int(named[1]) if named and named[1] else 0
        if len(lines) > 1 and (named is None or named[1] is None):
            raise
        raise LineError(f"line {lines[index].number}: {named[2] if named else e}") from None


def _prompt(llm: "LLM", line: Line, rendering: dict[str, Any]) -> Any:
    if line.kind != "messages":
        return {line.kind: line.value}
    if llm.tokenizer is None:
        raise RequestError("messages need tokenizer files (tokenizer.json), which this model has not")
    how = Rendering(**(rendering | line.rendering))
    return {"prompt_token_ids": llm.tokenizer.encode_chat(line.value, how)[1]}


def _read(number: int, line: str) -> Line:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise RequestError(f"not JSON ({e})") from None
    kinds = [kind for kind in _KINDS if isinstance(entry, dict) and entry.get(kind) is not None]
    if not isinstance(entry, dict) or len(kinds) != 1:
        raise RequestError(f"expected an object with one of {', '.join(_KINDS)}")
    (kind,) = kinds
    value = entry[kind]
    if not isinstance(value, str if kind == "prompt" else list):
        raise RequestError(f"{kind} must be a {'text' if kind == 'prompt' else 'list'}")
    told = NAMES if kind == "messages" else ()
    known = (*_KINDS, *told, *option_names())
    # As over HTTP null is what was left out; a seed is then drawn.
    given = {name for name, one in entry.items() if one is not None or name == "seed"}
    rendering = {name: entry[name] for name in told if name in given}
    fields = {name: entry[name] for name in option_names() if name in given}
    kept = {name: one for name, one in entry.items() if name not in known}
    for name in kept:
        if name in ANSWERED:
            raise RequestError(f"the answer has a key {name!r} of its own: rename yours")
        if name == "return_history":
            raise RequestError(f"there is no parameter {name!r}: a history is for Python alone")
        meant = resembling(name, known)
        if meant is not None:
            raise RequestError(f"there is no parameter {name!r}: did you mean {meant!r}?")
    return Line(number, kind, value, fields, rendering, kept)


@contextlib.contextmanager
def _naming(number: int) -> Iterator[None]:
    try:
        yield
    except RequestError as e:
        raise LineError(f"line {number}: {e}") from None
