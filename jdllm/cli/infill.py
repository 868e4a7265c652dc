"""`jdllm infill`: what is missing inside texts."""

from pathlib import Path
from typing import Annotated, Any

import typer

from jdllm.cli.compiling import told_of_compiling
from jdllm.cli.engine import ModelOptions, asked_sampling, load_model, takes_model
from jdllm.cli.generate import TokenIds, print_outputs
from jdllm.cli.hosts import runs_on_hosts
from jdllm.cli.options import Json, given_sampling, takes_sampling
from jdllm.cli.prompt import read_prompts


@takes_sampling("gen_length", "max_tokens", "early_stop", "stop", "stop_token_ids", "prompt_masks")
@runs_on_hosts
@takes_model
def infill(
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT]...", help="Texts with the model's mask token.", show_default=False),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read one text from a file.")] = None,
    token_ids: TokenIds = None,
    as_json: Json = False,
    *,
    source: ModelOptions,
    **options: Any,
) -> None:
    """Fill the mask tokens inside each text, and print it whole.

    Texts come from one of: arguments, --file, --token-ids, or standard input.
    """
    asked = read_prompts(texts, file, token_ids)
    sampling = asked_sampling(source, given_sampling(options))
    llm = load_model(source)
    with told_of_compiling():
        outputs = llm.infill(asked.texts, sampling, token_ids=asked.token_ids, progress=True)
    print_outputs(outputs, as_json)
