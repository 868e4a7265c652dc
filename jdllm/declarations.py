"""What pydantic says of a value that a declaration does not allow, in one line for a user."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from jdllm.arguments import shortened


def explain(error: ValidationError, declaration: type) -> str:
    """The first thing wrong with what a declaration was given: the field, its value and what is expected."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    properties = TypeAdapter(declaration).json_schema()["properties"]
    if name not in properties:
        return f"there is no parameter {name or shortened(first['input'])}"
    expected = first["msg"] if first["type"] == "expected" else _described(properties[name])
    return f"{name} is {shortened(first['input'])}, expected {expected}"


def _described(schema: Mapping[str, Any]) -> str:
    """What a JSON schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(_described(part) for part in schema["anyOf"])
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
        case "string":
            return "a text of at least one character"
        case "array":
            return f"{_described(schema['items'])}, or a list of such"
    return "None"
