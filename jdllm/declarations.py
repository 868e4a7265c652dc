"""Declarations in words: what pydantic says of a value that one does not allow, and what its fields mean."""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, get_type_hints

from pydantic import TypeAdapter, ValidationError

from jdllm.arguments import shortened


def plain(value: object) -> object:
    """NumPy's scalars as Python's. There are none until NumPy is loaded, and help texts are printed
    without it."""
    if "numpy" not in sys.modules:
        return value
    import numpy as np

    return value.item() if isinstance(value, np.generic) else value


def listed(value: object) -> object:
    """NumPy's arrays as lists."""
    if "numpy" not in sys.modules:
        return value
    import numpy as np

    return value.tolist() if isinstance(value, np.ndarray) else value


def explain(error: ValidationError, declaration: type) -> str:
    """The first mistake in the values of a declaration: the field, its value and the expected values."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    properties = TypeAdapter(declaration).json_schema()["properties"]
    if name not in properties:
        return f"there is no parameter {name or shortened(first['input'])}"
    expected = first["msg"] if first["type"] == "expected" else described(properties[name])
    return f"{name} is {shortened(first['input'])}, expected {expected}"


def described(schema: Mapping[str, Any]) -> str:
    """What a JSON schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(described(part) for part in schema["anyOf"])
    if "enum" in schema:
        return f"one of {', '.join(map(repr, schema['enum']))}"
    if "exclusiveMinimum" in schema:
        return f"a number above {schema['exclusiveMinimum']:g}, at most {schema['maximum']:g}"
    match schema["type"]:
        case "integer":
            most = schema.get("maximum", schema.get("exclusiveMaximum", 0) - 1)
            return f"an integer from {schema['minimum']} to {most}"
        case "number":
            return f"a number from {schema['minimum']:g} to {schema['maximum']:g}"
        case "boolean":
            return "True or False"
        case "string" if "minLength" in schema:
            return "a text of at least one character"
        case "string":
            return f"a {schema.get('format', 'text')}"
        case "object":
            return "a mapping"
        case "array":
            return f"{described(schema['items'])}, or a list of such"
    return "None"


def descriptions(declaration: type) -> dict[str, str]:
    """The first sentence of a declaration's docstring on each field, with its default; several fields may
    share an entry."""
    return first_sentences(declaration.__doc__ or "")


def first_sentences(docstring: str) -> dict[str, str]:
    """As `descriptions`, of a docstring."""
    found = {}
    for entry in re.split(r"\n\s*- ", docstring):
        heads = re.match(r"(`\w+`( \((`[^`]*`|[^()`])*\))?(, )?)+: ", entry)
        if heads is None:
            continue
        sentence = re.split(r"[.;](?:\s|$)", entry[heads.end() :], maxsplit=1)[0]
        text = re.sub(r" \([^()]*quirk[^()]*\)", "", " ".join(sentence.replace("`", "").split()))
        for name, default in re.findall(r"`(\w+)`(?: \(([^`()]+|`None`:[^()]+)\))?", heads[0]):
            shown = default.rpartition(": ")[2].replace("`", "").strip('"')
            hidden = shown in ("", "False", "True", "none")
            found[name] = f"{text[0].upper()}{text[1:]}." + ("" if hidden else f" [default: {shown}]")
    return found


def takes[**P, T, S](
    declaration: Callable[P, T],
) -> Callable[[Callable[[S, T], None]], Callable[Concatenate[S, P], None]]:
    """Give a method that takes a declaration an argument for each field of this declaration.

    Type checkers, editors and `help` see the fields, their defaults and the docstring of the declaration.
    """
    signature = inspect.signature(declaration)
    types = get_type_hints(declaration)  # without the checks that annotations carry
    fields = [field.replace(annotation=types[name]) for name, field in signature.parameters.items()]

    def decorate(method: Callable[[S, T], None]) -> Callable[Concatenate[S, P], None]:
        @functools.wraps(method)
        def run(self: S, *args: P.args, **kwargs: P.kwargs) -> None:
            signature.bind(*args, **kwargs)  # Python's own error for a name that is no field
            method(self, declaration(*args, **kwargs))

        owner = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = inspect.Signature([owner, *fields])  # type: ignore[attr-defined]
        run.__doc__ = declaration.__doc__
        return run

    return decorate
