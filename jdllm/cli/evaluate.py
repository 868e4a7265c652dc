"""`jdllm eval`: exact match and speed on the demo's tasks."""

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from jdllm.cli.options import (
    DEFAULTS,
    Alg,
    AlgTemp,
    BlockLength,
    Cache,
    CfgScale,
    Dtype,
    EntropyBound,
    Eps,
    Factor,
    FactorEnd,
    Json,
    Model,
    OfficialForcing,
    PoolKernel,
    Quota,
    RefreshDelay,
    RefreshInterval,
    Remasking,
    Retention,
    Seed,
    Steps,
    Temperature,
    Threshold,
    ThresholdStrict,
    TopK,
    TopP,
    Transfer,
    UndefinedTokens,
    load_model,
    sampling_params,
)
from jdllm.cli.report import print_result
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo.tasks import MAX_INSTANCES

if TYPE_CHECKING:
    from jdllm.demo.evaluate import Generate, Generation
    from jdllm.llm import LLM


def evaluate(
    ctx: typer.Context,
    model: Model = None,
    task: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="May be repeated.", show_default="all tasks")
    ] = None,
    instances: Annotated[
        int, typer.Option(min=1, max=MAX_INSTANCES, help="Held-out test instances of each task.")
    ] = 1000,
    dtype: Dtype = "auto",
    as_json: Json = False,
    gen_length: Annotated[
        int | None, typer.Option(help="Tokens to generate.", show_default="that of the training")
    ] = None,
    steps: Steps = DEFAULTS.steps,
    block_length: BlockLength = DEFAULTS.block_length,
    temperature: Temperature = DEFAULTS.temperature,
    cfg_scale: CfgScale = DEFAULTS.cfg_scale,
    remasking: Remasking = DEFAULTS.remasking,
    transfer: Transfer = DEFAULTS.transfer,
    threshold: Threshold = DEFAULTS.threshold,
    threshold_strict: ThresholdStrict = DEFAULTS.threshold_strict,
    factor: Factor = DEFAULTS.factor,
    factor_end: FactorEnd = DEFAULTS.factor_end,
    entropy_bound: EntropyBound = DEFAULTS.entropy_bound,
    alg: Alg = DEFAULTS.alg,
    alg_temp: AlgTemp = DEFAULTS.alg_temp,
    eps: Eps = DEFAULTS.eps,
    top_p: TopP = DEFAULTS.top_p,
    top_k: TopK = DEFAULTS.top_k,
    quota: Quota = DEFAULTS.quota,
    undefined_tokens: UndefinedTokens = DEFAULTS.undefined_tokens,
    seed: Seed = DEFAULTS.seed,
    cache: Cache = DEFAULTS.cache,
    retention: Retention = DEFAULTS.retention,
    pool_kernel: PoolKernel = DEFAULTS.pool_kernel,
    refresh_delay: RefreshDelay = DEFAULTS.refresh_delay,
    refresh_interval: RefreshInterval = DEFAULTS.refresh_interval,
    official_forcing: OfficialForcing = DEFAULTS.official_forcing,
) -> None:
    """Score a model on the tasks of the bundled demo model.

    For each task: exact match on instances that training never saw, beside the answer of the most similar
    training string; tokens per forward evaluation; and seconds of generation, without loading and compiling.
    Every block is run, as the official sampler does.
    """
    from rich.console import Console
    from rich.progress import track

    from jdllm.demo.evaluate import evaluate as score
    from jdllm.demo.evaluate import render_table
    from jdllm.demo.tasks import GEN_LENGTH, TASKS, find_task

    length = GEN_LENGTH if gen_length is None else gen_length
    sampling = sampling_params(ctx, gen_length=length, early_stop=False)
    names = [find_task(name).name for name in task or TASKS]
    generate = generator(load_model(model, dtype), sampling)
    console = Console(stderr=True)
    shown = track(names, "evaluating", console=console, transient=True, disable=not console.is_terminal)
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
