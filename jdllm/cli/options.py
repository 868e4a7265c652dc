"""Options that commands share beside those of the model, and what they are turned into."""

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from jdllm.decoding.prefilling import Prefilling
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.sampling_options import parameter_helps, parameter_kinds, parameter_names
from jdllm.engine_options import EngineOptions
from jdllm.errors import RequestError
from jdllm.structured.structure import Structure

ServedNames = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="What clients call the model; may be repeated.",
        show_default="the checkpoint's name",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
WarmPrefilling = Annotated[
    str | None,
    typer.Option(
        "--prefilling",
        metavar="PRESET|JSON",
        help="Compile the stages of questions over long contexts too, with these settings.",
        show_default="they are compiled when first needed",
    ),
]


def option_names() -> list[str]:
    """Parameters that are options, those of rules and policies too; a history is for Python alone."""
    return [name for name in parameter_names(SamplingParams) if name != "return_history"]


def takes_sampling(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every field of `SamplingParams`.

    Arguments:
    - `left_out`: fields that the command decides itself.

    The command takes them as `**options`, as they were typed: see `given_sampling`. A parser that is made
    later has options for rules and policies that were registered meanwhile.
    """
    return lambda command: _TakesSampling(command, left_out)


class _TakesSampling:
    """A command whose signature has the options of this moment."""

    def __init__(self, command: Callable[..., None], left_out: tuple[str, ...]):
        functools.update_wrapper(self, command)
        self._command = command
        self._left_out = left_out

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._command(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self._command)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in _annotations().items()
            if name not in self._left_out
        ]
        return signature.replace(parameters=[*own, *options])


def given_sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SamplingParams` from the options that were typed; what is no number stays a text, which the
    declaration refuses in its own words."""
    kinds = parameter_kinds(SamplingParams)
    return {name: _value(kinds[name], typed) for name, typed in options.items() if typed not in (None, [])}


def parse_prefilling(typed: str) -> Prefilling:
    """A preset or fields in JSON, as they were typed; raises `RequestError`."""
    found = SamplingParams(**given_sampling({"prefilling": typed})).prefilling
    if found is None:
        raise RequestError(f"prefilling is {typed!r}, expected a preset or fields in JSON")
    return found


def as_option(name: str) -> str:
    """`gen_length` as `--gen-length`."""
    return f"--{name.replace('_', '-')}"


_ENGINE_NAMES = [f.name for f in dataclasses.fields(EngineOptions) if "_" in f.name]
_VALUE = r"""=(?:'([^']*)'|([\w.]+))"""


def _named() -> re.Pattern[str]:
    """Finds the names of options in messages.

    A name of one word is a word of other sentences too: it has to stand where the library puts a field.
    """
    any_name = "|".join((*option_names(), "mc_num", "batch_size", "memory"))  # of likelihoods, and of `LLM`
    return re.compile(
        rf"\b(?<!')({'|'.join((*_long_names(), *_ENGINE_NAMES))})\b(?:{_VALUE})?"
        rf"|(?:^|(?<=: )|(?<=leave )|(?<=set )|(?<=needs )|(?<= and )|(?<= or ))({any_name})\b(?:{_VALUE})?"
        rf"|\b({any_name})(?= '|=)(?:{_VALUE})?"
    )


def _long_names() -> list[str]:
    return [name for name in option_names() if "_" in name]


def in_option_words(message: str) -> str:
    """A message of the library with its fields as options: `set cfg_scale=0` as `set --cfg-scale 0`."""

    def option(found: re.Match[str]) -> str:
        name, *values = [part for part in found.groups() if part is not None]
        return " ".join([as_option(name), *values])

    return _named().sub(option, message.replace("prompt_token_ids", "--token-ids"))


def _annotations() -> dict[str, Any]:
    """The option of each field: its type, its choices and its help, as `SamplingParams` states them."""
    helps = {name: _in_options(text) for name, text in parameter_helps(SamplingParams).items()}
    kinds = parameter_kinds(SamplingParams)
    return {name: _option(name, kinds[name], helps.get(name, "")) for name in option_names()}


def _in_options(text: str) -> str:
    return re.sub(rf"\b({'|'.join(_long_names())})\b", lambda found: as_option(found[0]), text)


def _option(name: str, kind: Any, text: str) -> Any:
    flag = as_option(name)
    if bool in _leaves(kind):
        off = f"--no-{flag[2:]}"
        return Annotated[bool | None, typer.Option(f"{flag}/{off}", help=text, show_default=False)]
    several = _has(kind, tuple)
    option = typer.Option(flag, metavar=_metavar(kind), help=text, show_default=False)
    return Annotated[list[str] | None, option] if several else Annotated[str | None, option]


def _metavar(kind: Any) -> str:
    leaves = _leaves(kind)
    if Prefilling in leaves:
        return "PRESET|JSON"
    if _is_mapping(kind) or Structure in leaves:
        return "JSON"
    choices = [leaf for leaf in leaves if isinstance(leaf, str)]
    if choices:
        return "|".join(choices)
    if str in leaves:
        return "TEXT"
    return "INTEGER" if int in leaves else "NUMBER" if float in leaves else "TEXT"


def _value(kind: Any, typed: Any) -> Any:
    leaves = _leaves(kind)
    if Prefilling in leaves and typed.startswith("{"):
        return parsed(typed)
    if _is_mapping(kind) or Structure in leaves:
        return parsed(typed) if typed.startswith("{") else typed
    if isinstance(typed, list):
        return tuple(_value(tuple(leaves), one) for one in typed)
    if isinstance(typed, bool) or typed in leaves:
        return typed
    if typed == "none" and NoneType in leaves:
        return None
    for number in () if str in leaves else (int, float):
        if number in leaves:
            try:
                return number(typed)
            except ValueError:
                continue
    return typed


def parsed(typed: str) -> Any:
    """Fields in JSON; what is none stays a text."""
    try:
        return json.loads(typed)
    except (ValueError, RecursionError):
        return typed


def _is_mapping(kind: Any) -> bool:
    return _has(kind, dict)


def _has(kind: Any, container: type) -> bool:
    """Whether an annotation, or one of the types that it allows, is such a container."""
    return any(get_origin(part) is container for part in (kind, *get_args(kind)))


def _leaves(kind: Any) -> list[Any]:
    """The plain types in an annotation, and the values of its `Literal`s."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    parts = kind if isinstance(kind, tuple) else get_args(kind)
    return [leaf for part in parts for leaf in _leaves(part)] if parts else [kind]
