"""What form an answer has: one declaration for the library, the command line and HTTP."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from jdllm.declarations import explain, listed
from jdllm.errors import RequestError

MOST_CHARACTERS = 1 << 17
"""Characters of a structure, of all its choices together."""

MOST_CHOICES = 4096

_SCHEMA = "a JSON schema: an object, true or false, or its JSON"


def _read_schema(value: object) -> object:
    """A JSON schema as its JSON; the order of properties is that of the answer."""
    if value is None:
        return None
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        if isinstance(parsed, Mapping | bool):
            return json.dumps(parsed if isinstance(parsed, bool) else dict(parsed), allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        pass
    raise PydanticCustomError("expected", _SCHEMA)


def _read_choice(value: object) -> object:
    value = listed(value)
    return tuple(value) if isinstance(value, list) else value


_Text = Annotated[str, Field(min_length=1)]
_Schema = Annotated[
    Any, BeforeValidator(_read_schema, json_schema_input_type=dict[str, Any] | bool | str | None)
]
_Choice = Annotated[
    Annotated[tuple[_Text, ...], Field(min_length=1, max_length=MOST_CHOICES)] | None,
    BeforeValidator(_read_choice),
]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))
class Structure:
    """The form of an answer: exactly one of these.

    - `json_schema`: JSON that this schema allows, written as Python's `json.dumps` does. An object, true or
      false, or their JSON; kept as JSON.
    - `json_object`: any JSON object.
    - `regex`: a text that this regular expression matches as a whole, in the syntax of Rust's `regex`.
    - `grammar`: a text of this grammar, in the Lark syntax of llguidance.
    - `choice`: one of these texts.

    Raises `RequestError` for none of these or several, and for one that is too long.
    """

    json_schema: _Schema = None
    json_object: bool = False
    regex: _Text | None = None
    grammar: _Text | None = None
    choice: _Choice = None

    @model_validator(mode="wrap")
    @classmethod
    def _explained(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise RequestError(f"structure has a wrong field: {explain(error, cls)}") from None

    def __post_init__(self):
        given = self._given
        if len(given) != 1:
            raise RequestError(
                f"structure has {' and '.join(given) or 'nothing'}, expected one of json_schema, json_object,"
                " regex, grammar and choice"
            )
        length = sum(map(len, self.choice or ())) + len(self.json_schema or self.regex or self.grammar or "")
        if length > MOST_CHARACTERS:
            raise RequestError(
                f"structure has a {given[0]} of {length} characters, expected at most {MOST_CHARACTERS}"
            )

    @property
    def kind(self) -> str:
        """The name of the field that it has."""
        return self._given[0]

    @property
    def _given(self) -> list[str]:
        return [f.name for f in dataclasses.fields(self) if getattr(self, f.name) not in (None, False)]


def _read(value: object) -> object:
    """`Structure` or `None` as they are, and its fields in a mapping."""
    match value:
        case None | Structure():
            return value
        case Mapping():
            return Structure(**{str(key): part for key, part in value.items()})
    raise PydanticCustomError(
        "expected", "Structure, or its field in a mapping, as {'choice': ['yes', 'no']}"
    )


StructureLike = Annotated[Structure | None, BeforeValidator(_read, json_schema_input_type=Structure | None)]
"""`Structure`, or its field in a mapping."""
