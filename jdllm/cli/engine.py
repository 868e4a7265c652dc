"""Options of the commands that load a model: the fields of `EngineOptions`, in its own words."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import annotated_types
import typer

from jdllm.byte_sizes import DEFAULT_HOST_MEMORY, parse_host_memory
from jdllm.cli.options import as_option, parsed
from jdllm.declarations import descriptions
from jdllm.decoding.sampling import SamplingParams
from jdllm.engine_options import EngineOptions, Typed
from jdllm.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from jdllm.llm import LLM
    from jdllm.models.config import ModelConfig

HELPS = descriptions(EngineOptions)
"""What help says of each field."""

_SOURCE = "Checkpoint directory, GGUF file, or hub id such as org/name."
_BUNDLED = "the bundled demo model"
Model = Annotated[str | None, typer.Option(metavar="DIR_OR_HUB_ID", help=_SOURCE, show_default=_BUNDLED)]
ModelArgument = Annotated[
    str | None, typer.Argument(metavar="[DIR_OR_HUB_ID]", help=_SOURCE, show_default=_BUNDLED)
]
NOWHERE = "none"
"""The cache directory of a command that keeps nothing."""


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Which model a command loads, and how.

    - `model`: a directory, GGUF file or hub id, `None` for the bundled demo model.
    - `given`: the fields of `EngineOptions` that are options, read from what was typed.
    """

    model: str | None
    given: Mapping[str, Any]


def takes_options(*left_out: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command an option for the model and for every field of `EngineOptions` that commands have.

    Arguments:
    - `left_out`: fields that the command has no use for.

    The command takes all of them as `source`. It may have an own form of `model`.
    """
    shared = {name: option for name, option in _options().items() if name not in left_out}

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.name != "source" and p.kind is not p.VAR_KEYWORD]
        others = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
        options = [option for name, option in shared.items() if name not in signature.parameters]

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            read = {name: _read(name, given.pop(name)) for name in shared if name != "model"}
            model = given["model"] if "model" in signature.parameters else given.pop("model")
            return command(source=ModelOptions(model, read), **given)

        run.__signature__ = signature.replace(parameters=[*own, *options, *others])  # type: ignore[attr-defined]
        return run

    return add


def takes_model(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command all options of a model that it loads; it takes them as `source`."""
    return takes_options()(command)


def asked_sampling(source: ModelOptions, given: Mapping[str, Any]) -> SamplingParams:
    """The defaults of a checkpoint, which `load_model` need not have loaded, with other values.

    Raises `RequestError` for a value that no request can have or the model cannot do, or not without a
    verifier, and as `LLM` does for the checkpoint.
    """
    from jdllm.decoding.generation_defaults import default_sampling

    config = _config(source)
    sampling = default_sampling(_directory(source.model), causal=config.in_order).changed(**given)
    _checked(config, source, sampling)
    return sampling


def checked_config(source: ModelOptions, sampling: SamplingParams) -> "ModelConfig":
    """The configuration of a checkpoint, which `load_model` need not have loaded.

    Arguments:
    - `sampling`: what requests will ask of the model.

    Raises `RequestError` where the model cannot do this, or not without a verifier, and as `LLM` does for the
    checkpoint and for the form of its weights.
    """
    return _checked(_config(source), source, sampling)


def _config(source: ModelOptions) -> "ModelConfig":
    from jdllm.models.hf_config import config_from_checkpoint

    return config_from_checkpoint(_directory(source.model), source.given["hf_overrides"])


def _checked(config: "ModelConfig", source: ModelOptions, sampling: SamplingParams) -> "ModelConfig":
    """What `checked_config` returns, and raises, for the configuration of the checkpoint."""
    from jdllm.serving.modes.registry import mode_of

    mode_of(config).check_sampling(sampling)
    if sampling.adaptive and source.given["verifier"] is None:
        raise RequestError("transfer 'adaptive' needs an autoregressive verifier: name one by --verifier")
    return dataclasses.replace(config, cards=source.given["devices"]).quantised(source.given["quantization"])


def load_model(source: ModelOptions) -> "LLM":
    """Load a checkpoint, or the demo model; raises as `LLM` does."""
    from jdllm.llm import LLM

    return LLM(**as_arguments(source))


def as_arguments(source: ModelOptions) -> dict[str, Any]:
    """Arguments of `LLM`, with the directory of the model; the runtime may then pin the host memory."""
    host_memory = source.given["host_memory"]
    if host_memory != DEFAULT_HOST_MEMORY:
        from jdllm.planning.host import let_pin

        let_pin(parse_host_memory(host_memory, "--host-memory"))
    return {"model": _directory(source.model), **source.given}


def _directory(model: str | None) -> Path:
    from jdllm.checkpoints.loading import resolve
    from jdllm.demo import checkpoint_path

    return checkpoint_path() if model is None else resolve(model)


def _options() -> dict[str, inspect.Parameter]:
    """A parameter for the model, and for each field that commands have."""
    kinds = get_type_hints(EngineOptions, include_extras=True)
    options = {"model": _parameter("model", None, Model)}
    for field in dataclasses.fields(EngineOptions):
        marks = [mark for mark in get_args(kinds[field.name]) if isinstance(mark, Typed)]
        if marks:
            option = _option(field.name, kinds[field.name], marks[0])
            options[field.name] = _parameter(field.name, field.default, option)
    return options


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option(name: str, kind: Any, typed: Typed) -> Any:
    """How typer reads a field: a number within its bounds, a switch that may be left alone, or a text."""
    flag, text = as_option(name), HELPS[name]
    if get_args(kind)[0] is bool:
        return Annotated[bool, typer.Option(flag, help=text)]
    if get_args(kind)[0] == bool | None:
        switch = typer.Option(f"{flag}/--no-{flag[2:]}", help=text, show_default=False)
        return Annotated[bool | None, switch]
    if typed.metavar is not None:
        option = typer.Option(flag, metavar=typed.metavar, help=text, show_default=False)
        return Annotated[str | None, option]
    least = next(bound.ge for bound in _bounds(kind))
    return Annotated[int | None, typer.Option(flag, min=least, help=text, show_default=False)]


def _bounds(kind: Any) -> list[Any]:
    found = [bound for part in getattr(kind, "__metadata__", ()) for bound in getattr(part, "metadata", ())]
    found += [bound for part in get_args(kind) for bound in _bounds(part)]
    return [bound for bound in found if isinstance(bound, annotated_types.Ge)]


def _read(name: str, typed: Any) -> Any:
    """The value of a field from what was typed."""
    match name:
        case "hf_overrides":
            return None if typed is None else _parse_overrides(typed)
        case "cache_dir" if typed != EngineOptions.cache_dir:
            return None if typed == NOWHERE else Path(typed)
    return typed


def _parse_overrides(typed: str) -> dict[str, Any]:
    values = parsed(typed)
    if not isinstance(values, dict):
        raise ConfigError(
            f"--hf-overrides is {typed!r}, expected a JSON object such as '{{\"rope_theta\": 4e6}}'"
        )
    return values
