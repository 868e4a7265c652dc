"""Options that a command takes together, as one value."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class OptionGroup:
    """A base of dataclasses whose fields are options: annotated as typer has it, each with a default."""


def takes_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command an option for each field of each `OptionGroup` that it takes."""
    signature = inspect.signature(command)
    groups = {name: p.annotation for name, p in signature.parameters.items() if _is_group(p.annotation)}

    def options() -> Iterator[inspect.Parameter]:
        for name, parameter in signature.parameters.items():
            for field in dataclasses.fields(groups[name]) if name in groups else ():
                yield parameter.replace(name=field.name, annotation=field.type, default=field.default)
            if name not in groups:
                yield parameter

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        return command(**made, **given)

    run.__signature__ = signature.replace(parameters=list(options()))  # type: ignore[attr-defined]
    return run


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, OptionGroup)
