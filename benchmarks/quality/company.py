"""How often a request's tokens alone are those in company, by cache and dtype, on the bundled demo model.

Run as `python3 -m benchmarks company [--dtypes float32 bfloat16] [--instances 128] [--out DIR]`. All requests
run at once, each with one of the caches in turn and every other one with a threshold, and then one by one. In
f32 all tokens are the same; in bf16 a product's rounding may depend on how many rows it has.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.cases import case_parser
from benchmarks.quality.cells import ALL_POLICIES, RULES, draw_instances
from benchmarks.record import record
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo import checkpoint_path
from jdllm.demo.compare import same_tokens
from jdllm.demo.tasks import GEN_LENGTH
from jdllm.demo.tokenizer import plain_ids
from jdllm.llm import LLM

BLOCK_LENGTH = 8


def settings(count: int) -> list[SamplingParams]:
    """The sampling of `count` requests."""
    kinds = itertools.cycle(itertools.product(("schedule", "threshold"), ALL_POLICIES))
    return [
        SamplingParams(
            gen_length=GEN_LENGTH,
            block_length=BLOCK_LENGTH,
            early_stop=False,
            cache=cache,  # pyright: ignore[reportArgumentType]
            **RULES[rule],
        )
        for rule, cache in itertools.islice(kinds, count)
    ]


def measure(llm: LLM, prompts: Sequence[Sequence[int]], dtype: str) -> list[dict[str, Any]]:
    """A row for each cache: shares of tokens and of whole answers that are the same.

    Tokens count up to the end of the longer answer, end ids included.
    """
    sampling = settings(len(prompts))
    together = llm.generate(prompt_token_ids=prompts, sampling=sampling)
    alone = [
        llm.generate(prompt_token_ids=[p], sampling=s)[0] for p, s in zip(prompts, sampling, strict=True)
    ]
    sides = [np.array([output.token_ids for output in side], np.int32) for side in (alone, together)]
    rows = []
    for cache in ALL_POLICIES:
        members = [i for i, s in enumerate(sampling) if s.cache == cache]
        first, second = (side[members] for side in sides)
        rows.append(
            {
                "dtype": dtype,
                "cache": cache,
                "requests": len(members),
                "same_tokens": same_tokens(first, second),
                "same_answers": float((first == second).all(axis=1).mean()),
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("company", __doc__)
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--instances", type=int, default=128)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    args = parser.parse_args(arguments)
    prompts = [plain_ids(instance.prompt) for instance in draw_instances(args.instances)]
    prompts = [prompts[i] for i in np.random.default_rng(0).permutation(len(prompts))]
    table = []
    for dtype in args.dtypes:
        llm = LLM(
            checkpoint_path(),
            dtype=dtype,
            max_num_batched_tokens=args.max_num_batched_tokens,
            progress=False,
        )
        table += measure(llm, prompts, dtype)
    record("company_demo", table, args.out)
