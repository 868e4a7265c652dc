"""Causal models with random weights: prompts to their first token, and tokens of one and of many requests."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx

from benchmarks.cases import case_parser
from benchmarks.record import measure_ceilings, print_row, record
from benchmarks.shapes import CAUSAL_SHAPES
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.module import Transformer
from jdllm.execution.paged.pool import PAGE_ROWS, pool_bytes
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import param_bytes
from jdllm.planning.step_time import RATES, step_flops
from jdllm.serving.updates import StepUpdate

DECODED = 129
_CARD = "h200"


def prompts_of(config: ModelConfig, count: int, length: int, seed: int) -> list[np.ndarray]:
    """Random ids; those of another seed begin otherwise, so that nothing of them is stored."""
    rng = np.random.default_rng([seed, count, length])
    return [rng.integers(2, config.vocab_size // 2, length) for _ in range(count)]


def seconds_of(llm: LLM, prompts: list[np.ndarray], tokens: int) -> float:
    """From the call to the last of so many tokens of each prompt."""
    sampling = SamplingParams(max_tokens=tokens, early_stop=False)
    start = time.perf_counter()
    outputs = llm.generate(prompt_token_ids=prompts, sampling=sampling)
    seconds = time.perf_counter() - start
    assert all(len(output.token_ids) == tokens and not output.num_cached_tokens for output in outputs)
    return seconds


def told_seconds(llm: LLM, prompts: list[np.ndarray], tokens: int) -> list[float]:
    """From the call to each token, as `LLM.stream` tells them."""
    sampling = SamplingParams(max_tokens=tokens, early_stop=False)
    start = time.perf_counter()
    updates = llm.stream(prompt_token_ids=prompts, sampling=sampling)
    return [time.perf_counter() - start for update in updates if isinstance(update, StepUpdate)]


def prefill(llm: LLM, length: int, repeats: int) -> dict[str, Any]:
    """The median time to the first token of a prompt, beside its arithmetic."""
    config = llm.config
    times = [
        seconds_of(llm, prompts_of(config, 1, length, seed), 1) for seed in range(repeats + 1)
    ]  # the first compiles
    floor = step_flops(config, length, 1) / RATES[_CARD].flops / config.cards
    seconds = statistics.median(times[1:])
    return {
        "what": "prefill",
        "batch": 1,
        "prompt": length,
        "seconds": seconds,
        "tokens_s": length / seconds,
        "floor_s": floor,
        "share_of_floor": floor / seconds,
    }


def decode(llm: LLM, batch: int, length: int, repeats: int, bytes_per_second: float) -> dict[str, Any]:
    """The median time of a token of each request, beside its bytes: what many tokens take more than one."""
    config = llm.config
    steps, streamed = [], []
    for seed in range(repeats + 1):
        one, many = (
            seconds_of(llm, prompts_of(config, batch, length, 2 * seed + i), tokens)
            for i, tokens in enumerate((1, DECODED))
        )
        steps.append((many - one) / (DECODED - 1))
        told = told_seconds(llm, prompts_of(config, batch, length, 2 * (repeats + 1) + seed), DECODED)
        streamed.append((told[-1] - told[batch - 1]) / (DECODED - 1))
    seconds = statistics.median(steps[1:])
    rows = batch * (length + DECODED // 2)
    read = param_bytes(config, "bfloat16") - config.vocab_size * config.hidden_size * 2
    read += rows * pool_bytes(config, "bfloat16", 1, PAGE_ROWS) / PAGE_ROWS
    floor = read / bytes_per_second / config.cards
    return {
        "what": "decode",
        "batch": batch,
        "prompt": length,
        "seconds": seconds,
        "tokens_s": batch / seconds,
        "streamed_s": statistics.median(streamed[1:]),
        "floor_s": floor,
        "share_of_floor": floor / seconds,
    }


def main(arguments: Sequence[str]) -> None:
    """Time to the first token, and of a token.

    `python3 -m benchmarks causal [--prefill 8192 32768 131072] [--decode 1x4096 32x1024]` on a card, or on
    several with `--devices`. A prompt is one part where --max-num-batched-tokens leaves room for it and 64
    tokens of others. Decodes run up to 16 tokens a dispatch; `streamed_s` is a token of `LLM.stream`. Floors
    are arithmetic at the rate of plans for an H200, causal attention counted once, or the bytes of weights
    and keys at the rate of a copy, as the run measures it; of several cards each has its share of both.
    """
    parser = case_parser("causal", main.__doc__)
    parser.add_argument("--shape", choices=CAUSAL_SHAPES, default="llama-3.1-8b")
    parser.add_argument("--prefill", type=int, nargs="*", default=[8192, 32768, 131072])
    parser.add_argument("--decode", nargs="*", default=["1x4096", "32x1024"], help="requests x tokens")
    parser.add_argument("--max-num-batched-tokens", type=int, default=131136)
    parser.add_argument("--memory")
    parser.add_argument("--devices", type=int, default=1, help="cards of each step")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(arguments)
    sizes = {"max_num_batched_tokens": args.max_num_batched_tokens, "memory": args.memory}
    model = Transformer(CAUSAL_SHAPES[args.shape], rngs=nnx.Rngs(0), dtype="bfloat16")
    table, ceilings = [], measure_ceilings()
    with LLM(model, devices=args.devices, progress=False, **sizes) as llm:
        # What is compiled stands in for smaller sizes: short prompts come first.
        for length in sorted(args.prefill):
            table.append({"shape": args.shape, **prefill(llm, length, args.repeats)})
            print_row(table[-1])
        for batch, length in (map(int, one.split("x")) for one in args.decode):
            table.append({"shape": args.shape, **decode(llm, batch, length, args.repeats, ceilings.bytes)})
            print_row(table[-1])
    name = f"causal_{args.shape}" + (f"_{args.memory}" if args.memory else "")
    name += f"_cards{args.devices}" if args.devices > 1 else ""
    record(name, table, args.out, ceiling_tb_s=ceilings.bytes / 1e12, **sizes)
