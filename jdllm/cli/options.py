"""Options that commands share, and what they are turned into."""

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from jdllm.decoding.prefilling import Prefilling
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.sampling_options import parameter_helps, parameter_kinds, parameter_names
from jdllm.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from jdllm.llm import LLM

Model = Annotated[
    str | None,
    typer.Option(
        metavar="DIR_OR_HUB_ID",
        help="Checkpoint directory, or hub id such as org/name.",
        show_default="the bundled demo model",
    ),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[DIR_OR_HUB_ID]",
        help="Checkpoint directory, or hub id such as org/name.",
        show_default="the bundled demo model",
    ),
]
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
BatchedTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Packed rows of one step over all requests; a longer request runs alone.",
        show_default="chosen from the memory, 8192 to 36864",
    ),
]
MaxNumLogits = Annotated[
    int | None,
    typer.Option(min=1, help="Masked rows whose logits may exist at a time.", show_default="what fits"),
]
MaxContext = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="The longest sequence that the KV pool leaves room for.",
        show_default="a step's rows; longer ones without a cache take the pool's room",
    ),
]
HfOverrides = Annotated[
    str | None,
    typer.Option(
        metavar="JSON", help="Values in the place of those of config.json.", show_default="as it is"
    ),
]
KvPool = Annotated[
    str | None,
    typer.Option(metavar="BYTES", help="Size of the KV pool.", show_default="what the memory leaves"),
]
HOST_MEMORY = "64GiB"
KERNELS = "auto|triton|xla"
KERNELS_HELP = "Kernels that may run: those that suit the card, those in Triton only, or none."
NOWHERE = "none"
"""The cache directory of a command that keeps nothing."""


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Which model a command loads, and how: options of every command that runs one."""

    model: Model = None
    dtype: Annotated[
        str, typer.Option(metavar="auto|float32|bfloat16|float16", help="Type of the weights.")
    ] = "auto"
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="What the device may hold in all, such as 24GiB.",
            show_default="what XLA may allot",
        ),
    ] = None
    host_memory: Annotated[
        str,
        typer.Option(metavar="BYTES", help="Host memory that a step may use where the device is too small."),
    ] = HOST_MEMORY
    max_num_batched_tokens: BatchedTokens = None
    max_num_logits: MaxNumLogits = None
    max_context: MaxContext = None
    kv_pool: KvPool = None
    hf_overrides: HfOverrides = None
    cache_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|none",
            help="Where executables are kept for the next command, which need not compile them.",
            show_default="~/.cache/jdllm/executables",
        ),
    ] = None
    kernels: Annotated[str, typer.Option(metavar=KERNELS, help=KERNELS_HELP)] = "auto"


def takes_model(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every field of `ModelOptions`, except for those that it takes itself.

    The command takes all of them as `source`.
    """
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.name != "source" and p.kind is not p.VAR_KEYWORD]
    others = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    kinds = get_type_hints(ModelOptions, include_extras=True)
    fields = {f.name: f.default for f in dataclasses.fields(ModelOptions)}
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name])
        for name, default in fields.items()
        if name not in signature.parameters
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        source = ModelOptions(**{name: given.pop(name) for name in fields})
        if source.host_memory != HOST_MEMORY:
            from jdllm.byte_sizes import parse_host_memory
            from jdllm.planning.host import let_pin

            let_pin(parse_host_memory(source.host_memory, "--host-memory"))
        command(source=source, **given)

    run.__signature__ = signature.replace(parameters=[*own, *options, *others])  # type: ignore[attr-defined]
    return run


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


def asked_sampling(source: ModelOptions, given: Mapping[str, Any]) -> SamplingParams:
    """The defaults of a checkpoint, which `load_model` need not have loaded, with other values.

    Raises `RequestError` for a value that no request can have or the model cannot do, and as `LLM` does for
    the checkpoint.
    """
    from jdllm.decoding.generation_defaults import default_sampling
    from jdllm.models.hf_config import config_from_checkpoint
    from jdllm.serving.modes.registry import mode_of

    directory, overrides = _directory(source.model), parse_overrides(source.hf_overrides)
    config = config_from_checkpoint(directory, overrides)
    sampling = default_sampling(directory, causal=config.in_order).changed(**given)
    mode_of(config).check_sampling(sampling)
    return sampling


def load_model(source: ModelOptions, verifier: str | None = None) -> "LLM":
    """Load a checkpoint, or the demo model, and its verifier; raises as `LLM` does."""
    from jdllm.llm import LLM

    return LLM(**as_arguments(source), verifier=verifier)


def as_arguments(source: ModelOptions) -> dict[str, Any]:
    """Arguments of `LLM`: the directories are looked up."""
    asked = source.cache_dir
    cache_dir = "auto" if asked is None else None if asked == NOWHERE else Path(asked)
    read = {
        "model": _directory(source.model),
        "cache_dir": cache_dir,
        "hf_overrides": parse_overrides(source.hf_overrides),
    }
    return dataclasses.asdict(source) | read


def parse_overrides(typed: str | None) -> dict[str, Any] | None:
    """What `--hf-overrides` puts in the place of keys of config.json; raises `ConfigError` for no object."""
    if typed is None:
        return None
    values = _parsed(typed)
    if not isinstance(values, dict):
        raise ConfigError(
            f"--hf-overrides is {typed!r}, expected a JSON object such as '{{\"rope_theta\": 4e6}}'"
        )
    return values


def parse_prefilling(typed: str) -> Prefilling:
    """A preset or fields in JSON, as they were typed; raises `RequestError`."""
    found = SamplingParams(**given_sampling({"prefilling": typed})).prefilling
    if found is None:
        raise RequestError(f"prefilling is {typed!r}, expected a preset or fields in JSON")
    return found


def _directory(model: str | None) -> Path:
    from jdllm.checkpoints.loading import resolve
    from jdllm.demo import checkpoint_path

    return checkpoint_path() if model is None else resolve(model)


def as_option(name: str) -> str:
    """`gen_length` as `--gen-length`."""
    return f"--{name.replace('_', '-')}"


_ENGINE_NAMES = ("host_memory", "kv_pool", "max_context", "max_num_batched_tokens", "max_num_logits")
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
    several = any(get_origin(part) is tuple for part in (kind, *get_args(kind)))
    option = typer.Option(flag, metavar=_metavar(kind), help=text, show_default=False)
    return Annotated[list[str] | None, option] if several else Annotated[str | None, option]


def _metavar(kind: Any) -> str:
    leaves = _leaves(kind)
    if Prefilling in leaves:
        return "PRESET|JSON"
    choices = [leaf for leaf in leaves if isinstance(leaf, str)]
    if choices:
        return "|".join(choices)
    return "INTEGER" if int in leaves else "NUMBER" if float in leaves else "TEXT"


def _value(kind: Any, typed: Any) -> Any:
    leaves = _leaves(kind)
    if Prefilling in leaves and typed.startswith("{"):
        return _parsed(typed)
    if isinstance(typed, list):
        return tuple(_value(tuple(leaves), one) for one in typed)
    if isinstance(typed, bool) or typed in leaves:
        return typed
    if typed == "none" and NoneType in leaves:
        return None
    for number in (int, float):
        if number in leaves:
            try:
                return number(typed)
            except ValueError:
                continue
    return typed


def _parsed(typed: str) -> Any:
    """Fields in JSON; what is none stays a text."""
    try:
        return json.loads(typed)
    except (ValueError, RecursionError):
        return typed


def _leaves(kind: Any) -> list[Any]:
    """The plain types in an annotation, and the values of its `Literal`s."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    parts = kind if isinstance(kind, tuple) else get_args(kind)
    return [leaf for part in parts for leaf in _leaves(part)] if parts else [kind]
