"""The form of an answer, as OpenAI's and vLLM's clients ask for it."""

from typing import Annotated, Any, Literal, NamedTuple, Required, TypedDict

from pydantic import Field, with_config

from jdllm.api.fields import Fields

Schema = dict[str, Any] | bool
"""A JSON schema."""


class TextFormat(Fields):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Fields):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(TypedDict, total=False):
    """A JSON schema by OpenAI's names; `strict` or not, every answer has the form that the schema says."""

    name: Required[str]
    schema: Required[Schema]
    strict: bool | None
    description: str | None


class JsonSchemaFormat(Fields):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class FlatSchemaFormat(TypedDict, total=False):
    """`JsonSchemaFormat` as POST /v1/responses has it."""

    type: Required[Literal["json_schema"]]
    name: Required[str]
    schema: Required[Schema]
    strict: bool | None
    description: str | None


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


@with_config(extra="forbid")
class StructuredOutputs(TypedDict, total=False):
    """vLLM's fields, of which a request has one."""

    json: Schema | str | None
    json_object: bool | None
    regex: str | None
    grammar: str | None
    choice: list[str] | None


class Form(NamedTuple):
    """The form that a request asks for: the `field` that says so, and its value as `Structure` takes it."""

    field: str
    structure: dict[str, Any]


def of_format(field: str, format: Any) -> list[Form]:
    """The form that a `format` asks for; none where it is text."""
    match format:
        case JsonObjectFormat() | {"type": "json_object"}:
            return [Form(field, {"json_object": True})]
        case JsonSchemaFormat():
            return [Form(field, {"json_schema": format.json_schema["schema"]})]
        case {"type": "json_schema", "schema": schema}:
            return [Form(field, {"json_schema": schema})]
    return []


_NAMES = {"json": "json_schema"}
"""vLLM's names of the fields of `Structure`, where they differ."""


def _named(fields: dict[str, Any]) -> dict[str, Any]:
    return {_NAMES.get(name, name): value for name, value in fields.items() if value is not None}


class FormFields(Fields):
    """Fields that say what form an answer has; a request has one of them, or `structure`."""

    response_format: Annotated[
        ResponseFormat | None,
        Field(description="The form of the answer: text, or JSON."),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, Field(description="The form of the answer in vLLM's words.")
    ] = None
    guided_json: Annotated[Schema | str | None, Field(description="The answer is JSON of this schema.")] = (
        None
    )
    guided_regex: Annotated[str | None, Field(description="This expression matches the answer.")] = None
    guided_choice: Annotated[list[str] | None, Field(description="The answer is one of these.")] = None
    guided_grammar: Annotated[str | None, Field(description="The answer is a text of this grammar.")] = None

    @property
    def forms(self) -> list[Form]:
        """What the fields say, one by one."""
        found = of_format("response_format", self.response_format)
        if self.structured_outputs is not None:
            found.append(Form("structured_outputs", _named(dict(self.structured_outputs))))
        for name in ("json", "regex", "choice", "grammar"):
            field = f"guided_{name}"
            if (value := getattr(self, field)) is not None:
                found.append(Form(field, _named({name: value})))
        return found
