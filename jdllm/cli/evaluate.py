"""`jdllm eval`: exact match and speed on the demo's tasks, for two models too, and long contexts."""

import dataclasses
import importlib.util
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from jdllm.cli.compare import check_denoises, evaluate_two
from jdllm.cli.compiling import told_of_compiling
from jdllm.cli.engine import ModelOptions, asked_sampling, load_model, takes_model
from jdllm.cli.evaluate_long import benchmark_of, evaluate_benchmark, long_generator
from jdllm.cli.hosts import runs_on_hosts
from jdllm.cli.options import Json, given_sampling, takes_sampling
from jdllm.cli.report import print_result
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo import MAX_INSTANCES, checkpoint_path
from jdllm.engine_options import QUANTIZATIONS
from jdllm.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from jdllm.demo.evaluate import Generate, Generation
    from jdllm.llm import LLM


_HARNESS = "--harness"
_INSTANCES = 1000


class EvalCommand(TyperCommand):
    """Leaves everything after `--harness` to lm-eval, whose options have names of ours."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if _HARNESS in args:
            at = args.index(_HARNESS)
            if at > 0:
                ctx.fail(
                    f"{args[0]} stands before {_HARNESS}: put lm-eval's options behind it, ours have no use"
                )
            args = [_HARNESS, "--", *args[1:]]
        return super().parse_args(ctx, args)


@takes_sampling("early_stop", "n", "max_tokens", "stop", "stop_token_ids", "logprobs")
@runs_on_hosts
@takes_model
def evaluate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARG]...", help=f"After {_HARNESS}: of lm-eval.", show_default=False),
    ] = None,
    harness: Annotated[
        bool,
        typer.Option(_HARNESS, help="Run lm-eval's command line, with --model jdllm and the bundled tasks."),
    ] = False,
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="May be repeated. longbench[:DATASET] or infinitebench[:DATASET] for the samples of --data.",
            show_default="all tasks",
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Samples of LongBench or InfiniteBench in their public format, JSON lines. May be repeated.",
            show_default=False,
        ),
    ] = None,
    instances: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_INSTANCES,
            help="Held-out test instances of each task, or samples of each dataset.",
            show_default=f"{_INSTANCES}, or all of --data",
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar=f"{'|'.join(QUANTIZATIONS)}|DIR_OR_HUB_ID",
            help="Compare the answers with those of a second model: this form of the weights, or this"
            " checkpoint. All other options hold for both.",
            show_default=False,
        ),
    ] = None,
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

    --task longbench --data FILE asks and scores long contexts as LongBench does, and --task infinitebench as
    InfiniteBench; answers have the dataset's length unless --gen-length says otherwise.

    --compare int8 runs the tasks twice, with the weights as they are and then in 8 bits, and --compare DIR
    with two checkpoints. It prints exact match of both, the difference in percentage points with its paired
    95% interval, and the share of equal tokens.

    --harness ARG... is lm-eval itself, with any tasks, of which jdllm_demo are the bundled model's, and a
    model by --model_args pretrained=DIR,mc_num=128,...
    """
    if harness:
        run_harness(arguments or [])
        return
    if arguments:
        raise RequestError(f"unexpected argument {arguments[0]!r}: only {_HARNESS} takes some")
    if asked := benchmark_of(task or [], data or []):
        if compare is not None:
            raise RequestError(f"--compare is for the demo's tasks, and {asked[0]} is none: leave one away")
        _run_benchmark(*asked, data or [], instances, source, given_sampling(options), as_json)
        return
    from rich.console import Console
    from rich.progress import track

    from jdllm.demo.evaluate import evaluate as score
    from jdllm.demo.evaluate import render_table
    from jdllm.demo.tasks import GEN_LENGTH, TASKS, find_task

    given = {"gen_length": GEN_LENGTH, **given_sampling(options), "early_stop": False}
    names = [find_task(name).name for name in task or TASKS]
    if compare is not None:
        evaluate_two(names, instances or _INSTANCES, source, compare, given, as_json)
        return
    sampling = asked_sampling(source, given)
    check_denoises(source, f"--model {source.model}", sampling)
    generate = generator(load_model(source), sampling)
    console = Console(stderr=True)
    shown = track(names, "evaluating", console=console, transient=True, disable=not console.is_terminal)
    with told_of_compiling():
        results = [result for name in shown for result in score(generate, [name], instances or _INSTANCES)]
    if as_json:
        print_result(json.dumps({"tasks": [dataclasses.asdict(result) for result in results]}))
    else:
        print_result(render_table(results))


def _run_benchmark(
    benchmark: str,
    dataset: str | None,
    files: list[Path],
    limit: int | None,
    source: ModelOptions,
    given: dict[str, Any],
    as_json: bool,
) -> None:
    from jdllm.longbench.samples import read_samples

    groups = read_samples(files, benchmark, dataset, limit)
    # The checkpoint's own steps are for its own length.
    sampling = asked_sampling(source, {"steps": None, **given})
    generate = long_generator(load_model(source), sampling, "gen_length" in given)
    evaluate_benchmark(benchmark, groups, generate, as_json)


def run_harness(arguments: list[str]) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"{_HARNESS} needs lm-eval: install the extra, as in jdllm[harness]")
    from jdllm.harness.command import run

    defaults = {"pretrained": checkpoint_path()}
    with told_of_compiling():
        run(arguments, defaults, checkpoint_path().parent / "harness_tasks")


def generator(llm: "LLM", sampling: SamplingParams) -> "Generate":
    """A sampler for `jdllm.demo.evaluate`, timed without compiling.

    Arguments:
    - `llm`: the model.
    - `sampling`: without early stop, so that every response position counts as filled.
    """
    from jdllm.demo.evaluate import Generation

    blocks = max(1, sampling.gen_length // (sampling.block_length or sampling.gen_length))
    # One step a block packs the same shapes as many do: it compiles what the timed run needs.
    one_step = sampling.changed(steps=blocks)

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
