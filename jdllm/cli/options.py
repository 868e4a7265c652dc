"""Options that commands share, and what they are turned into."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jdllm.decoding.sampling import SamplingParams

if TYPE_CHECKING:
    from jdllm.llm import LLM

DEFAULTS = SamplingParams()

Model = Annotated[
    str | None,
    typer.Option(
        metavar="DIR_OR_HUB_ID",
        help="Checkpoint directory, or hub id such as org/name.",
        show_default="the bundled demo model",
    ),
]
Dtype = Annotated[str, typer.Option(metavar="auto|float32|bfloat16|float16", help="Type of the weights.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

Steps = Annotated[int | None, typer.Option(help="Denoising steps in all.", show_default="gen-length")]
BlockLength = Annotated[
    int | None,
    typer.Option(help="Length of the blocks, finished from left to right.", show_default="gen-length"),
]
Temperature = Annotated[float, typer.Option(help="Of the token draws; 0 takes the argmax.")]
CfgScale = Annotated[float, typer.Option(help="Strength of classifier-free guidance.")]
Remasking = Annotated[
    str, typer.Option(metavar="low_confidence|random", help="Which tokens are committed first.")
]
Seed = Annotated[int, typer.Option(help="Of all random draws.")]


def sampling_params(ctx: typer.Context, **fixed: Any) -> SamplingParams:
    """The sampling parameters among a command's options, which have the same names.

    Arguments:
    - `ctx`: of the command.
    - `fixed`: values that replace those of the options.

    Raises `RequestError` for a value that no request can have.
    """
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    given = {name: value for name, value in ctx.params.items() if name in names}
    return SamplingParams(**{**given, **fixed})


def load_model(model: str | None, dtype: str) -> "LLM":
    """Load a checkpoint, or the demo model for `None`; raises as `LLM` does."""
    from jdllm.demo import checkpoint_path
    from jdllm.llm import LLM

    return LLM(checkpoint_path() if model is None else model, dtype=dtype)
