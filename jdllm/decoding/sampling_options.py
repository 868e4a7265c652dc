"""The options of rules and policies among the parameters of `SamplingParams`."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from jdllm.arguments import shortened
from jdllm.declarations import described, first_sentences, plain
from jdllm.decoding.option import Option
from jdllm.decoding.registry import POLICIES, RULES, Declared, cache_names, options, rule_names
from jdllm.errors import RequestError

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_WIDTH = 106
_TEMPLATES: dict[type, str] = {}
"""What the docstrings of classes say before their options are filled in."""


def with_options[T: type](cls: T) -> T:
    """Give a class a field for each option that is declared by now, and its docstring the texts.

    A field that the class states already gets the declared type and bounds, and stays in its place. The
    docstring has `{transfer}`, `{alg}` and `{cache}` where the values of these parameters are explained, and
    `{options of transfer}` and so on where the options are.
    """
    for name, (option, _) in options().items():
        cls.__annotations__[name] = option.kind | None
        if name not in vars(cls):
            setattr(cls, name, None)
    _TEMPLATES[cls] = cls.__doc__ or ""
    cls.__doc__ = _filled(_TEMPLATES[cls])
    return cls


def taken_apart(cls: type, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is given, and of it the options that were registered after the class was made, checked.

    Raises `RequestError` for a value that an option does not allow.
    """
    declared = further_options(cls)
    fields = {name: value for name, value in given.items() if name not in declared}
    own = {name: _checked(declared[name].option, value) for name, value in given.items() if name in declared}
    return fields, {name: value for name, value in own.items() if value is not None}


def further_options(cls: type) -> dict[str, Declared]:
    """The options that were registered after the class was made."""
    return {name: one for name, one in options().items() if name not in cls.__annotations__}


def parameter_names(cls: type) -> list[str]:
    """The names of all parameters, in the order in which they are listed."""
    return [*cls.__annotations__, *further_options(cls)]


def parameter_kinds(cls: type) -> dict[str, Any]:
    """The types of all parameters, without their bounds; choices are a `Literal` of the known names."""
    further = {name: one.option.kind | None for name, one in further_options(cls).items()}
    bounded = {**get_type_hints(cls, include_extras=True), **further}
    kinds = get_type_hints(type(cls.__name__, (), {"__annotations__": bounded}))
    choices = {
        "transfer": _choice(rule_names("transfer")),
        "alg": _choice(rule_names("alg")) | None,
        "cache": _choice(cache_names()),
    }
    return kinds | {name: kind for name, kind in choices.items() if name in kinds}


def parameter_helps(cls: type) -> dict[str, str]:
    """The first sentence on each parameter in the docstring of `cls`, with its default."""
    return first_sentences(_filled(_TEMPLATES[cls]))


def option_schema(option: Option) -> dict[str, Any]:
    """The JSON schema of an option, which may be null."""
    return _adapter(option).json_schema()


def _choice(names: list[str]) -> Any:
    return Literal[tuple(names)]


def _adapter(option: Option) -> TypeAdapter[Any]:
    """Takes what `SamplingParams` would take in a field of its own."""
    kind: Any = option.kind | None
    return TypeAdapter(kind, config=_STRICT)


def _checked(option: Option, value: object) -> Any:
    try:
        return _adapter(option).validate_python(plain(value))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        # As of a field that may be null: `explain` says so too.
        expected = first["msg"] if first["type"] == "expected" else described(option_schema(option))
        raise RequestError(f"{option.name} is {shortened(value)}, expected {expected}") from None


def _filled(template: str) -> str:
    """A docstring with the texts of rules, policies and options."""
    rules = {
        field: {name: rule.help for (of, name), rule in RULES.items() if of == field}
        for field in ("transfer", "alg")
    }
    explained = rules | {"cache": {name: policy.help for name, policy in POLICIES.items()}}
    lines = []
    for line in template.splitlines():
        for field, texts in explained.items():
            if line.strip() == f"{{options of {field}}}":
                lines += _option_entries(field)
                break
            if f"{{{field}}}" in line:
                values = "; ".join(f'"{name}": {text}' for name, text in texts.items())
                line = textwrap.fill(
                    line.replace(f"{{{field}}}", f"{values}."), _WIDTH, subsequent_indent="      "
                )
        else:
            lines.append(line)
    return "\n".join(lines)


def _option_entries(field: str) -> Iterator[str]:
    """An entry of the docstring for each option that belongs to a parameter first; options of one text share
    an entry."""
    entries: dict[str, list[str]] = {}
    for name, (option, users) in options().items():
        if next(iter(users)) == field:
            entries.setdefault(option.help, []).append(f"`{name}` ({_shown(option)})")
    for text, names in entries.items():
        entry = f"{', '.join(names)}: {text}"
        yield textwrap.fill(entry, _WIDTH, initial_indent="    - ", subsequent_indent="      ")


def _shown(option: Option) -> str:
    if option.shown_default is not None:
        return f"`None`: {option.shown_default}"
    return f'"{option.default}"' if isinstance(option.default, str) else repr(option.default)
