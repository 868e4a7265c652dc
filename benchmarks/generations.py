"""Tokens per second of whole generations with random weights.

256 tokens in 256 steps, blocks of 32, as the published comparisons do. Each setting runs until nothing is
compiled any more, at least twice: which requests meet in a step differs a little from run to run. The last
run is timed; `compiled` is 0 unless even that one had to compile. `steps_ms` is the mean over a request's
forward evaluations; `evaluated` are those of the device, which are as many where all requests are in step.
"""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from flax import nnx

from benchmarks.cases import case_parser
from benchmarks.record import print_row, record
from benchmarks.shapes import SHAPES
from jdllm.decoding.cache_policies import Phase, kept, phase
from jdllm.decoding.registry import cache_names
from jdllm.decoding.sampling import Cache, SamplingParams
from jdllm.engine_options import QUANTIZATIONS
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.outputs import RequestOutput
from jdllm.pallas.device import Kernels
from jdllm.planning.step_time import RATES, step_flops

GEN_LENGTH, BLOCK_LENGTH = 256, 32
MOST_TIMED = 4

WORKLOAD = Path(__file__).parent / "workloads" / "ragged32.json"
CACHES = ("none", "dual", "sparse", "head_sparse")
"""The caches of which a reuse evaluates the block and nothing else, so that its rows are known."""


def measure(llm: LLM, batch: int, prompt: int, sampling: SamplingParams) -> dict[str, Any]:
    """One row of the table: `batch` equal requests of `prompt` random tokens."""
    return {"batch": batch, "prompt": prompt, **measure_prompts(llm, [prompt] * batch, sampling)}


def measure_prompts(llm: LLM, lengths: Sequence[int], sampling: SamplingParams) -> dict[str, Any]:
    """What a generation takes once its executables are there, all requests at once.

    Arguments:
    - `lengths`: tokens of each prompt.
    - `sampling`: of all requests, without `early_stop`.

    Returns the settings, tokens/s, seconds, the steps of a request, the evaluations of the device, and what
    was compiled meanwhile.
    """
    prompts = random_prompts(llm.config, lengths)

    def run() -> tuple[list[RequestOutput], int]:
        before = llm.engine.evaluated
        outputs = llm.generate(prompt_token_ids=prompts, sampling=sampling)
        return outputs, llm.engine.evaluated - before

    run()
    llm.engine.settle()
    (outputs, evaluated), seconds, compiled = settled(llm, run)
    return {
        "cache": sampling.cache,
        "retention": sampling.effective("retention") if _selects(sampling.cache) else 1.0,
        "delay": sampling.refresh_delay,
        "tokens_s": len(lengths) * sampling.gen_length / seconds,
        "seconds": seconds,
        "steps": outputs[0].nfe,
        "evaluated": evaluated,
        "compiled": compiled,
        "steps_ms": 1e3 * seconds / outputs[0].nfe,
    }


class Settled[T](NamedTuple):
    """A call that was timed.

    - `result`: what it returned.
    - `seconds`: until it returned.
    - `made`: executables that were compiled or loaded meanwhile and behind it.
    """

    result: T
    seconds: float
    made: int


def settled[T](llm: LLM, call: Callable[[], T]) -> Settled[T]:
    """Time a call that uses `llm`, the first one for which nothing was compiled or loaded.

    A larger executable may have stood in for what is made. Of `MOST_TIMED` calls the last one counts anyway.
    """
    calls = 0
    while True:
        before, start = _made(llm), time.perf_counter()
        result = call()
        seconds, calls = time.perf_counter() - start, calls + 1
        llm.engine.settle()
        made = _made(llm) - before
        if not made or calls == MOST_TIMED:
            return Settled(result, seconds, made)


def _made(llm: LLM) -> int:
    return llm.executables.compiled + llm.executables.loaded


def random_prompts(config: ModelConfig, lengths: Sequence[int]) -> list[np.ndarray]:
    """Prompts of these lengths, of ids from the lower half of the vocabulary, in which nothing is special."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, config.vocab_size // 2, length) for length in lengths]


def generation(cache: Cache, retention: float, delay: int | None, steps: int = GEN_LENGTH) -> SamplingParams:
    """The published comparisons' parameters; `retention` is for caches that keep a share of their rows."""
    return SamplingParams(
        gen_length=GEN_LENGTH,
        steps=steps,
        block_length=BLOCK_LENGTH,
        cache=cache,
        retention=retention if _selects(cache) else None,
        refresh_delay=delay,
        early_stop=False,
    )


def _selects(cache: Cache) -> bool:
    """Whether a cache keeps a share of its rows."""
    return cache in ("sparse", "head_sparse")


def _suffix(kernels: str) -> str:
    """What tells the record of other kernels from that of the default ones."""
    return "" if kernels == "auto" else f"_{kernels}"


def generate(arguments: Sequence[str]) -> None:
    """Equal requests, all at once.

    `python3 -m benchmarks generate [--cache dual] [--batch 1 8] [--prompt 512] [--shape llada-8b]
    [--devices 1 2 4] [--quantization int8]` on as many cards.
    """
    parser = case_parser("generate", generate.__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--cache", nargs="+", choices=cache_names(), default=["dual"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, nargs="+", default=[512])
    parser.add_argument("--retention", type=float, default=0.5)
    parser.add_argument("--delay", type=int, nargs="+", help="of the refresh; by default that of the policy")
    parser.add_argument("--steps", type=int, default=GEN_LENGTH, help="denoising steps of a request")
    parser.add_argument("--max-num-batched-tokens", type=int, help="by default as many as LLM chooses")
    parser.add_argument("--kernels", choices=get_args(Kernels), default="auto")
    parser.add_argument("--devices", type=int, nargs="+", default=[1], help="cards of each step")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of the matrices of layers")
    args = parser.parse_args(arguments)
    model = Transformer(SHAPES[args.shape], rngs=nnx.Rngs(0), dtype="bfloat16")
    names = "max_num_batched_tokens", "kernels", "quantization"
    options = {name: getattr(args, name) for name in names}
    table, rows = [], 0
    for devices in args.devices:
        with LLM(model, devices=devices, progress=False, **options) as llm:
            rows, asked = llm.account.rows, {"shape": args.shape}
            if args.devices != [1]:
                asked["devices"] = devices
            for cache, batch, prompt, delay in itertools.product(
                args.cache, args.batch, args.prompt, args.delay or [None]
            ):
                sampling = generation(cache, args.retention, delay, args.steps)
                table.append(asked | measure(llm, batch, prompt, sampling))
                print_row(table[-1])
    kinds = ("-".join(map(str, kind)) for kind in (args.cache, args.batch, args.prompt))
    name = "generate_{}_{}_b{}_p{}".format(args.shape, *kinds) + _suffix(args.kernels)
    name += f"_{args.quantization}" if args.quantization else ""
    cards = "" if args.devices == [1] else "_cards" + "-".join(map(str, args.devices))
    record(name + cards, table, args.out, max_num_batched_tokens=rows)


def prompt_lengths() -> list[int]:
    """Tokens of the workload's prompts."""
    return json.loads(WORKLOAD.read_text())["prompt_lengths"]


def generation_flops(config: ModelConfig, sampling: SamplingParams, prompt: int) -> float:
    """Floating-point operations of one request of `prompt` tokens that commits one token a step.

    A full step and a refresh evaluate the whole sequence, a reuse the block against what is stored; the head
    sees the masked rows of the block.

    Arguments:
    - `sampling`: with one of `CACHES`, and as many steps as tokens.
    """
    length, block = prompt + sampling.gen_length, sampling.block_length or sampling.gen_length
    stored = kept(sampling, length - block)
    total = 0.0
    for step in range(block):
        if phase(sampling, step) is Phase.REUSE:
            # A segment that sees itself whole has as many keys as rows.
            further_keys = 4.0 * config.num_layers * config.num_heads * config.head_dim * block * stored
            total += step_flops(config, block, block - step) + further_keys
        else:
            total += step_flops(config, length, block - step)
    return total * (sampling.gen_length // block)


def ragged(arguments: Sequence[str]) -> None:
    """32 requests of different lengths at once, beside what their arithmetic alone takes.

    `python3 -m benchmarks ragged [--cache head_sparse] [--delay 1 0] [--max-num-batched-tokens 36352]
    [--warmup]` on a card, by default with the step that `LLM` chooses; the prompts are as long as
    `benchmarks/workloads/ragged32.json` says. The floor is the arithmetic of all steps at the rate that full
    steps of jdllm reach; `share_of_floor` is its seconds over those measured.
    """
    parser = case_parser("ragged", ragged.__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--cache", nargs="+", choices=CACHES, default=["head_sparse"])
    parser.add_argument("--retention", type=float, default=0.5)
    parser.add_argument("--delay", type=int, nargs="+", default=[1, 0])
    parser.add_argument("--max-num-batched-tokens", type=int, nargs="+", default=[None])
    parser.add_argument("--requests", type=int, help="only the first of them")
    parser.add_argument("--kernels", choices=get_args(Kernels), default="auto")
    parser.add_argument("--warmup", action="store_true", help="compile everything before the first request")
    args = parser.parse_args(arguments)
    config, rate = SHAPES[args.shape], RATES["h200"].flops
    lengths = prompt_lengths()[: args.requests]
    model = Transformer(config, rngs=nnx.Rngs(0), dtype="bfloat16")
    table = []
    for max_num_batched_tokens in args.max_num_batched_tokens:
        asked = {"shape": args.shape, "requests": len(lengths)}
        start = time.perf_counter()
        with LLM(
            model,
            max_num_batched_tokens=max_num_batched_tokens,
            warmup=args.warmup,
            kernels=args.kernels,
            progress=False,
        ) as llm:
            asked["batched_tokens"] = llm.account.rows
            asked["warmup_s"] = time.perf_counter() - start if args.warmup else 0.0
            for cache, delay in itertools.product(args.cache, args.delay):
                sampling = generation(cache, args.retention, None if cache == "none" else delay)
                floor = sum(generation_flops(config, sampling, length) for length in lengths) / rate
                row = asked | measure_prompts(llm, lengths, sampling)
                row["floor_tokens_s"] = len(lengths) * sampling.gen_length / floor
                row["share_of_floor"] = floor / row["seconds"]
                table.append(row)
                print_row(row)
    record(f"ragged_{args.shape}{_suffix(args.kernels)}", table, args.out, floor_tflops=rate / 1e12)
