"""How a transfer rule or a cache policy declares a parameter of its own."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Option:
    """A parameter of `SamplingParams` that only the rules and policies use that declare it.

    In `SamplingParams` the parameter is `None` unless a request sets it. A rule and a policy may share an
    option; two options of one name may not differ.

    - `name`: of the parameter. A command has it as `--name`, a request over HTTP as a field.
    - `kind`: its type and bounds, as pydantic reads annotations.
    - `default`: what `None` stands for.
    - `help`: what the parameter means. The first sentence is the help of the command line and of the schema.
    - `array`: makes of the value what the device reads, such as `float`: a float, an integer or a bool, which
      an array holds in 32 bits or as a bool, or a scalar of NumPy. `None`: only the host reads the parameter.
    - `shown_default`: the default in words, where `default` itself says too little.
    - `offered`: whether the page of the server has a field for the parameter.
    """

    name: str
    kind: Any
    default: Any
    help: str
    array: Callable[[Any], Any] | None = None
    shown_default: str | None = None
    offered: bool = True
