"""What a request feels of a size that is compiled in the background meanwhile."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx

from benchmarks.cases import case_parser
from benchmarks.generations import GEN_LENGTH, generation, random_prompts
from benchmarks.record import print_row, record
from benchmarks.shapes import SHAPES
from jdllm.decoding.registry import cache_names
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.module import Transformer
from jdllm.llm import LLM


def measure(llm: LLM, prompt: int, sampling: SamplingParams) -> dict[str, Any]:
    """One request whose every step comes to the host.

    Returns its tokens/s, milliseconds of a step in the median and of the longest one, and the executables
    that were made meanwhile.
    """
    before = llm.executables.compiled + llm.executables.loaded
    times = [time.perf_counter()]
    for _ in llm.stream(prompt_token_ids=random_prompts(llm.config, [prompt]), sampling=sampling):
        times.append(time.perf_counter())
    steps = 1e3 * np.diff(times)
    return {
        "tokens_s": sampling.gen_length / (times[-1] - times[0]),
        "median_ms": float(np.median(steps)),
        "longest_ms": float(np.max(steps)),
        "made": llm.executables.compiled + llm.executables.loaded - before,
    }


def main(arguments: Sequence[str]) -> None:
    """Requests of sizes that a larger one stands in for, while theirs is compiled and after that.

    `python3 -m benchmarks background [--prompt 777 512] [--cache none]` on a card. `longest_ms` beyond
    `median_ms` is how long the tracing of the other size kept a step waiting.
    """
    parser = case_parser("background", main.__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--cache", choices=cache_names(), default="none")
    parser.add_argument("--larger", type=int, default=1500, help="tokens of the prompt that comes first")
    parser.add_argument("--prompt", type=int, nargs="+", default=[777, 512])
    args = parser.parse_args(arguments)
    model = Transformer(SHAPES[args.shape], rngs=nnx.Rngs(0), dtype="bfloat16")
    sampling, table = generation(args.cache, 0.5, None, GEN_LENGTH), []
    # Nothing is found that another process compiled.
    with LLM(model, cache_dir=None, progress=False) as llm:
        for when in ("alone", "again"):
            row = {"shape": args.shape, "cache": args.cache, "prompt": args.larger, "when": when}
            table.append(row | measure(llm, args.larger, sampling))
            llm.engine.settle()
        for prompt in args.prompt:
            for when in ("while a larger size serves", "afterwards"):
                row = {"shape": args.shape, "cache": args.cache, "prompt": prompt, "when": when}
                table.append(row | measure(llm, prompt, sampling))
                llm.engine.settle()
    for row in table:
        print_row(row)
    record(f"background_{args.shape}_{args.cache}", table, args.out)
