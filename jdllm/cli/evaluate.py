"""`jdllm eval`: exact match and speed on the demo's tasks."""

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jdllm.cli.compiling import told_of_compiling
from jdllm.cli.options import (
    Json,
    ModelOptions,
    asked_sampling,
    given_sampling,
    load_model,
    takes_model,
    takes_sampling,
)
from jdllm.cli.report import print_result
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo.tasks import MAX_INSTANCES

if TYPE_CHECKING:
    from jdllm.demo.evaluate import Generate, Generation
    from jdllm.llm import LLM


@takes_sampling("early_stop", "n", "max_tokens", "stop", "stop_token_ids", "logprobs")
@takes_model
def evaluate(
    task: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="May be repeated.", show_default="all tasks")
    ] = None,
    instances: Annotated[
        int, typer.Option(min=1, max=MAX_INSTANCES, help="Held-out test instances of each task.")
    ] = 1000,
    as_json: Json = False,
    *,
    source: ModelOptions,
    **options: Any,
) -> None:
    """Score a model on the tasks of the bundled demo model.

    For each task: exact match on instances that training never saw, beside the answer of the most similar
    training string; tokens per forward evaluation; and seconds of generation, without loading and compiling.
    Every block is run, as the official sampler does, and every answer has the length of the training's unless
    --gen-length says otherwise.
    """
    from rich.console import Console
    from rich.progress import track

    from jdllm.demo.evaluate import evaluate as score
    from jdllm.demo.evaluate import render_table
    from jdllm.demo.tasks import GEN_LENGTH, TASKS, find_task

    given = {"gen_length": GEN_LENGTH, **given_sampling(options), "early_stop": False}
    names = [find_task(name).name for name in task or TASKS]
    sampling = asked_sampling(source.model, given)
    generate = generator(load_model(source), sampling)
    console = Console(stderr=True)
    shown = track(names, "evaluating", console=console, transient=True, disable=not console.is_terminal)
    with told_of_compiling():
        results = [result for name in shown for result in score(generate, [name], instances)]
    if as_json:
        print_result(json.dumps({"tasks": [dataclasses.asdict(result) for result in results]}))
    else:
        print_result(render_table(results))


def generator(llm: "LLM", sampling: SamplingParams) -> "Generate":
    """A sampler for `jdllm.demo.evaluate`, timed without compiling.

    Arguments:
    - `llm`: the model.
    - `sampling`: without early stop, so that every response position counts as filled.
    """
    from jdllm.demo.evaluate import Generation

    blocks = max(1, sampling.gen_length // (sampling.block_length or sampling.gen_length))
    # One step a block packs the same shapes as many do: it compiles what the timed run needs.
    one_step = dataclasses.replace(sampling, steps=blocks)

    def compile_for(prompts: list[list[int]]) -> None:
        if sampling.cache == "none":
            llm.generate(prompt_token_ids=prompts, sampling=one_step)
            return
        # The cache has the size that the longest prompt asks for, which is a shape too. What a reuse packs
        # depends on which requests are through with their blocks: only the same run has the same shapes.
        llm.generate(prompt_token_ids=[max(prompts, key=len)], sampling=sampling)
        llm.generate(prompt_token_ids=prompts, sampling=sampling)

    def generate(prompts: list[list[int]]) -> "Generation":
        compile_for(prompts)
        start = time.perf_counter()
        outputs = llm.generate(prompt_token_ids=prompts, sampling=sampling)
        seconds = time.perf_counter() - start
        ids = [o.token_ids for o in outputs]
        return Generation(ids, sum(map(len, ids)), sum(o.nfe for o in outputs), seconds)

    return generate
