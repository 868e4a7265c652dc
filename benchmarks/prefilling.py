"""A question over a long context: end to end, by stage, and against the plain run on the whole context."""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any, get_args

import jax
import numpy as np
from flax import nnx

from benchmarks.cases import case_parser
from benchmarks.record import print_row, record
from benchmarks.shapes import SHAPES
from jdllm.decoding.prefilling import PRESETS, Prefilling, Preset
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.planning.plan import Workload
from jdllm.planning.prefilling import Question, plan_stages
from jdllm.planning.step_time import RATES, step_flops
from jdllm.prompts import LongPrompt

INSTRUCTION, QUERY, ANSWER = 32, 64, 32
GIB = 2**30
_PLAIN = 4  # steps of a plain run
_WARM = 131072  # tokens of context that meet every shape
_POSITIONS = 131072  # that Dream and UltraLLaDA state; the shape of LLaDA has fewer, and times depend on none


def question(vocabulary: int, context: int, seed: int) -> LongPrompt:
    """Random ids of the lower half of the vocabulary; seeds with the same tens share a context.

    No other length has a chunk of it, so that nothing of it is stored.
    """
    rng = np.random.default_rng([context, seed // 10])
    instruction, body = (rng.integers(2, vocabulary // 2, size) for size in (INSTRUCTION, context))
    query = np.random.default_rng(seed + 1000).integers(2, vocabulary // 2, QUERY)
    return LongPrompt(instruction=instruction, context=body, query=query)


def timed(llm: LLM, prompt: LongPrompt, sampling: SamplingParams) -> tuple[float, dict[str, float], int]:
    """Seconds of one call, those of its stages and of a step of its answer, and chunks that were stored."""
    start = time.perf_counter()
    (output,) = llm.generate(prompt, sampling)
    seconds = time.perf_counter() - start
    assert output.prefilling is not None
    stages = dict(output.prefilling.seconds)
    answer = (output.timings.running - sum(stages.values())) / max(output.nfe - 1, 1)
    return seconds, stages | {"answer_step": answer}, output.prefilling.cached_chunks


def measure(llm: LLM, context: int, prefilling: Prefilling, repeats: int) -> dict[str, Any]:
    """The median of several first questions, each over a context of its own, and that of second ones."""
    sampling = SamplingParams(
        gen_length=ANSWER, block_length=ANSWER, steps=ANSWER, early_stop=False, prefilling=prefilling
    )
    vocabulary = llm.config.vocab_size
    for seed in (0, 1):  # compiles, once more for what is stored
        timed(llm, question(vocabulary, min(context, _WARM), seed), sampling)
    first = [timed(llm, question(vocabulary, context, 10 * i), sampling) for i in range(1, repeats + 1)]
    second = [timed(llm, question(vocabulary, context, 10 * i + 1), sampling) for i in range(1, repeats + 1)]
    middle = sorted(first, key=lambda one: one[0])[repeats // 2]
    again = sorted(second, key=lambda one: one[0])[repeats // 2]
    return {
        "context": context,
        "seconds": middle[0],
        **{f"{name}_ms": 1e3 * seconds for name, seconds in middle[1].items()},
        "second_question_s": again[0],
        "second_score_ms": 1e3 * again[1]["score"],
        "stored_chunks": again[2],
        **floors(llm, context, prefilling),
    }


def floors(llm: LLM, context: int, prefilling: Prefilling) -> dict[str, float]:
    """Seconds that the products of scoring, and all stages, take at the rates of plans."""
    config, device = llm.config, "h200"
    chunks = -(-context // prefilling.chunk_length)
    behind = QUERY + (prefilling.draft_length if prefilling.score == "draft" else 0)
    # Without a shift a mask stands in for each token, and only masks meet the head.
    beside = 0 if config.logits_shift else behind
    rows = INSTRUCTION + min(prefilling.chunk_length, context) + behind + beside
    scoring = chunks * step_flops(config, rows, behind) / RATES[device].flops
    workload = Workload(config, "bfloat16")
    asked = Question(context, INSTRUCTION, QUERY, ANSWER, ANSWER)
    total = sum(s.seconds for s in plan_stages(workload, llm.account, device, prefilling, asked))
    return {"score_floor_ms": 1e3 * scoring, "floor_s": total}


def plain(llm: LLM, context: int) -> float:
    """Seconds of the exact run on the whole context, from one of its steps: they are all alike."""
    prompt = question(llm.config.vocab_size, context, 0)
    ids = np.concatenate([prompt.instruction, prompt.context, prompt.query])  # pyright: ignore
    sampling = SamplingParams(
        gen_length=ANSWER, steps=ANSWER, block_length=_PLAIN, max_tokens=_PLAIN, early_stop=False
    )
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        llm.generate(prompt_token_ids=[ids], sampling=sampling)
        seconds = time.perf_counter() - start
    return seconds * ANSWER / _PLAIN


def peak_gib() -> float:
    """The most that XLA has held on the device."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use", float("nan")) / GIB


def rows_of(shape: str, preset: Preset, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of the table for each context, from a model of its own."""
    config = dataclasses.replace(SHAPES[shape], max_positions=_POSITIONS)
    model = Transformer(config, rngs=nnx.Rngs(0), dtype="bfloat16")
    sizes = {"max_num_batched_tokens": args.max_num_batched_tokens, "memory": args.memory}
    table = []
    with LLM(model, progress=False, **sizes) as llm:
        for context in args.context:
            measured = measure(llm, context, PRESETS[preset], args.repeats)
            row: dict[str, Any] = {"shape": shape, "preset": preset, **measured}
            if context in args.plain:
                row["plain_s"] = plain(llm, context)
                row["times_faster"] = row["plain_s"] / row["seconds"]
            if preset == args.preset[0]:
                row["peak_gib"] = peak_gib()
            table.append(row)
            print_row(row)
    return table


def main(arguments: Sequence[str]) -> None:
    """Questions of 32 + 64 tokens over contexts of any length, answered by 32 tokens in 32 steps.

    `python3 -m benchmarks prefilling [--context 8192 131072] [--preset dream dream_sparse ultrallada]` on a
    card, with random weights. The median of --repeats first questions, and of as many second ones over the
    same contexts, end to end and by stage; with --plain against the exact run on the whole context, 4 of
    whose 32 steps are run. Every preset has a record of its own, and the shape of the model that it is for.
    The peak is that of the process, so only the first preset has one.
    """
    parser = case_parser("prefilling", main.__doc__)
    parser.add_argument("--shape", choices=SHAPES, help="by default that of the model that a preset is for")
    parser.add_argument("--context", type=int, nargs="+", default=[8192, 16384, 32768, 131072])
    parser.add_argument("--preset", nargs="+", choices=get_args(Preset), default=["dream"])
    parser.add_argument("--max-num-batched-tokens", type=int, default=36352)
    parser.add_argument("--memory")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plain", type=int, nargs="*", default=[], help="contexts to run plainly too")
    args = parser.parse_args(arguments)
    for preset in args.preset:
        shape = args.shape or ("llada-8b" if preset.startswith("ultrallada") else "dream-7b")
        name = f"prefilling_{shape}_{preset}" + (f"_{args.memory}" if args.memory else "")
        sizes = {"max_num_batched_tokens": args.max_num_batched_tokens, "memory": args.memory}
        record(name, rows_of(shape, preset, args), args.out, **sizes)
