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
_TRANSFERS = "schedule|threshold|factor|entropy_bound|margin"
Transfer = Annotated[str, typer.Option(metavar=_TRANSFERS, help="Which tokens a step commits.")]
TransferOrAdaptive = Annotated[
    str, typer.Option(metavar=f"{_TRANSFERS}|adaptive", help="Which tokens a step commits.")
]
Threshold = Annotated[float | None, typer.Option(help="Confidence that --transfer threshold asks for.")]
ThresholdStrict = Annotated[
    bool | None, typer.Option("--threshold-strict", help="Confidences have to exceed the threshold.")
]
Factor = Annotated[float | None, typer.Option(help="Slope of --transfer factor.")]
FactorEnd = Annotated[
    str | None, typer.Option(metavar="official|fixed", help="End of the factor rule's loop.")
]
EntropyBound = Annotated[
    float | None, typer.Option(help="Nats that --transfer entropy_bound spends in a step.")
]
Alg = Annotated[
    str | None,
    typer.Option(
        metavar="origin|maskgit_plus|topk_margin|entropy|confidence_threshold",
        help="Dream's sampler instead of LLaDA's.",
    ),
]
AlgTemp = Annotated[float | None, typer.Option(help="Above 0, Dream's order is drawn at this temperature.")]
Eps = Annotated[float | None, typer.Option(help="Where Dream's timetable ends.")]
TopP = Annotated[float | None, typer.Option(help="Dream's nucleus filter.")]
TopK = Annotated[int | None, typer.Option(help="Dream's top-k filter.")]
Quota = Annotated[str | None, typer.Option(metavar="row|batch", help="Masks that Dream's timetable counts.")]
UndefinedTokens = Annotated[
    str | None,
    typer.Option(
        metavar="official|banned",
        help="Whether the mask id and ids without a meaning may be chosen. [default: by --transfer]",
    ),
]
Seed = Annotated[int | None, typer.Option(help="Of all random draws.")]
Cache = Annotated[
    str,
    typer.Option(
        metavar="none|prefix|dual|selective|sparse|head_sparse",
        help="Keys and values that steps reuse; all but none are approximate.",
    ),
]
Retention = Annotated[float | None, typer.Option(help="Share of the rows that the sparse caches keep.")]
PoolKernel = Annotated[
    int | None, typer.Option(help="Odd width of the max pool over the sparse caches' scores; 1 for none.")
]
RefreshDelay = Annotated[
    int | None,
    typer.Option(
        help="Step of a block, from 0 on, that refreshes the cache."
        " [default: 1 for sparse, head_sparse and selective, else 0]"
    ),
]
RefreshInterval = Annotated[
    int | None,
    typer.Option(help="Refresh at the multiples of it, too; 0 for never. [default: 8 for selective, else 0]"),
]
OfficialForcing = Annotated[
    bool | None,
    typer.Option(
        "--official-forcing",
        help="With Dream and a cache, commit a block's first token in its first step, as published.",
    ),
]


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


def load_model(model: str | None, dtype: str, verifier: str | None = None) -> "LLM":
    """Load a checkpoint, or the demo model for `None`, and its verifier; raises as `LLM` does."""
    from jdllm.demo import checkpoint_path
    from jdllm.llm import LLM

    return LLM(checkpoint_path() if model is None else model, dtype=dtype, verifier=verifier)
