"""Conversations as chat templates take them, and how they are rendered."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jdllm.arguments import shortened
from jdllm.errors import RequestError

Message = Mapping[str, Any]
"""`role` and `content`, and whatever else a chat template may read, such as `tool_calls`. The content is a
text or a list of parts, each `{"type": "text", "text": ...}`."""

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are text, and the key that holds it."""

SILENT = ("assistant", "tool", "function")
"""Roles whose messages may be without content: a call of a tool is one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendering:
    """How a chat template renders a conversation.

    - `add_generation_prompt` (`None`: unless the last message is continued): end with the beginning of an
      answer.
    - `continue_final_message` (False): end inside the last message, which the answer goes on with.
    - `chat_template_kwargs` (none): variables of the template, such as `{"enable_thinking": False}`.

    Raises `RequestError` for values of other types, and for both of the first two.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name, kind in (("add_generation_prompt", bool | None), ("continue_final_message", bool)):
            if not isinstance(getattr(self, name), kind):
                raise RequestError(f"{name} is {shortened(getattr(self, name))}, expected True or False")
        variables = self.chat_template_kwargs
        if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
            raise RequestError(
                f"chat_template_kwargs is {shortened(variables)}, expected variables of the template by name"
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "continue_final_message ends in the last message, and add_generation_prompt begins another:"
                " set one of them"
            )

    @property
    def begins_answer(self) -> bool:
        """Whether the text ends with the beginning of an answer."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


def plain_message(index: int, message: Message) -> dict[str, Any]:
    """A message whose content is one text, without keys whose value is `None`.

    Arguments:
    - `index`: of the message, for errors.

    Raises `RequestError` for anything else.
    """
    fields = _without_none(message) if isinstance(message, Mapping) else {}
    content = fields.get("content")
    if isinstance(content, list | tuple):
        fields["content"] = "\n".join(_part(index, i, part) for i, part in enumerate(content))
    elif content is None and fields.get("role") in SILENT:
        fields["content"] = ""
    if not all(isinstance(fields.get(key), str) for key in ("role", "content")):
        raise RequestError(
            f"message {index} is {message!r}, expected an object with texts 'role' and 'content'"
        )
    return fields


def _part(index: int, at: int, part: object) -> str:
    fields = part if isinstance(part, Mapping) else {}
    kind = fields.get("type")
    text = fields.get(TEXT_PARTS[kind]) if kind in TEXT_PARTS else None
    if not isinstance(text, str):
        raise RequestError(
            f"message {index}: content part {at} is {part!r}, expected {{'type': 'text', 'text': ...}}"
        )
    return text


def _without_none(value: Any) -> Any:
    """A message without entries that are `None`; arguments of a tool's call may hold such."""
    if isinstance(value, Mapping):
        return {
            key: entry if key == "arguments" else _without_none(entry)
            for key, entry in value.items()
            if entry is not None
        }
    return [_without_none(entry) for entry in value] if isinstance(value, list | tuple) else value


def forms(messages: Sequence[dict[str, Any]], template: str) -> Iterator[list[dict[str, Any]]]:
    """The same plain messages as different templates take them, the likeliest form first.

    A developer is the system to templates that do not name that role. Arguments of tools' calls are objects,
    as transformers documents them, or the JSON text that OpenAI's API has. What a tool or a function returned
    keeps its role, and is the user's to templates that refuse it.
    """
    known = [
        one | {"role": "system"} if one["role"] == "developer" and "developer" not in template else one
        for one in messages
    ]
    called = [_with_parsed_arguments(one) for one in known]
    tried: list[list[dict[str, Any]]] = []
    for rename, form in itertools.product((False, True), (called, known)):
        renamed = [one | {"role": "user"} if rename and one["role"] in SILENT[1:] else one for one in form]
        if renamed not in tried:
            tried.append(renamed)
            yield renamed


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return message | {"tool_calls": [_parsed(call) for call in calls]} if isinstance(calls, list) else message


def _parsed(call: Any) -> Any:
    """A tool's call whose arguments are an object, where they are its JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call
