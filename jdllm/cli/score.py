"""`jdllm score`: how likely an answer is."""

import json
from typing import Annotated

import typer

from jdllm.cli.compiling import told_of_compiling
from jdllm.cli.engine import ModelOptions, load_model, takes_model
from jdllm.cli.hosts import runs_on_hosts
from jdllm.cli.options import Json
from jdllm.cli.report import print_result


@runs_on_hosts
@takes_model
def score(
    prompt: Annotated[str, typer.Argument(help="What comes before; may be empty.", show_default=False)],
    answer: Annotated[str, typer.Argument(help="What is scored.", show_default=False)],
    mc_num: Annotated[int, typer.Option(min=1, help="Masked copies of the answer to average over.")] = 128,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Copies among which the number of masks is stratified.")
    ] = 16,
    cfg_scale: Annotated[float, typer.Option(help="Classifier-free guidance.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the masks.")] = 0,
    block_length: Annotated[
        int | None,
        typer.Option(min=1, help="Positions of a block of a block model; at 1 the value is exact."),
    ] = None,
    as_json: Json = False,
    *,
    source: ModelOptions,
) -> None:
    """log p(answer | prompt), natural logarithm: exact of a causal model, else by stratified Monte Carlo."""
    llm = load_model(source)
    with told_of_compiling():
        found = llm.score(
            prompt,
            answer,
            mc_num=mc_num,
            batch_size=batch_size,
            cfg_scale=cfg_scale,
            seed=seed,
            block_length=block_length,
        )
    print_result(json.dumps({"log_likelihood": found}) if as_json else f"{found:.6g}")
