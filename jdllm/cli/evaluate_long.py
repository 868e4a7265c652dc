"""`jdllm eval --task longbench --data FILE`: benchmarks of long contexts."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jdllm.cli.compiling import told_of_compiling
from jdllm.cli.report import print_result
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError

if TYPE_CHECKING:
    from jdllm.llm import LLM
    from jdllm.longbench.evaluate import Generate
    from jdllm.longbench.samples import Sample
    from jdllm.prompts import PromptLike

_BENCHMARKS = ("longbench", "infinitebench")


def benchmark_of(tasks: Sequence[str], files: Sequence[Path]) -> tuple[str, str | None] | None:
    """The benchmark that a command line asks for, and one dataset of it where it names one.

    Arguments:
    - `tasks`, `files`: of `--task` and `--data`.

    Returns `None` where neither speaks of a benchmark.

    Raises `RequestError` for a benchmark without files, files without one, and other tasks beside it.
    """
    named = [task for task in tasks if task.partition(":")[0] in _BENCHMARKS]
    if not named and not files:
        return None
    if not named:
        raise RequestError(f"--data is for benchmarks: add --task {' or --task '.join(_BENCHMARKS)}")
    if len(tasks) > 1:
        raise RequestError(f"--task {named[0]} stands alone, but there are {len(tasks)} tasks")
    if not files:
        raise RequestError(f"--task {named[0]} needs its samples: add --data FILE")
    benchmark, _, dataset = named[0].partition(":")
    return benchmark, dataset or None


def evaluate_benchmark(
    benchmark: str, groups: Mapping[str, Sequence["Sample"]], generate: "Generate", as_json: bool
) -> None:
    """Score the samples of each dataset, and print the figures.

    Arguments:
    - `groups`: as `jdllm.longbench.samples.read_samples` returns them.
    - `as_json`: print one JSON object, and not a table.
    """
    from jdllm.longbench.evaluate import average, evaluate, render_table

    with told_of_compiling():
        results = [evaluate(benchmark, samples, generate) for samples in groups.values()]
    if as_json:
        figures = [dataclasses.asdict(result) for result in results]
        print_result(json.dumps({"benchmark": benchmark, "datasets": figures, "average": average(results)}))
    else:
        print_result(render_table(results))


def long_generator(llm: "LLM", sampling: SamplingParams, own_length: bool) -> "Generate":
    """A sampler for `jdllm.longbench.evaluate`.

    Arguments:
    - `llm`: the model.
    - `sampling`: for all samples.
    - `own_length`: generate `gen_length` tokens, and not what the dataset has; that number is rounded up to
      whole blocks, and the answer is cut to it.
    """

    def generate(samples: Sequence["Sample"], max_new_tokens: int) -> list[str]:
        asked = sampling if own_length else sampling.changed(max_tokens=max_new_tokens)
        cut = sampling.prefilling is not None
        outputs = llm.generate([_prompt(sample, cut) for sample in samples], asked, progress=True)
        return [output.text or "" for output in outputs]

    return generate


def _prompt(sample: "Sample", cut: bool) -> "PromptLike":
    """The prompt as a whole, or in parts whose context is cut into chunks."""
    from jdllm.prompts import LongPrompt

    if not cut:
        return sample.instruction + sample.context + sample.query
    return LongPrompt(instruction=sample.instruction, context=sample.context, query=sample.query)
