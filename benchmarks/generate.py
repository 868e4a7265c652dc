"""Tokens per second of whole generations with random weights, and what one step of each kind takes.

Run as `python3 -m benchmarks.generate [--cache dual] [--batch 1 8] [--prompt 512] [--shape llada-8b]` on a
card: 256 tokens in 256 steps, blocks of 32, as the published comparisons do. Each setting runs twice; the
second run is timed, so that nothing is compiled. `steps_ms` is the mean over a request's forward evaluations;
`evaluated` are those of the device, which are as many where all requests are in step.
"""

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from flax import nnx

from benchmarks.record import record
from benchmarks.shapes import SHAPES
from jdllm.decoding.sampling import Cache, SamplingParams
from jdllm.llm import LLM
from jdllm.models.module import Transformer

GEN_LENGTH, BLOCK_LENGTH = 256, 32


def measure(llm: LLM, batch: int, prompt: int, sampling: SamplingParams) -> dict[str, Any]:
    """One row of the table: `batch` equal requests of `prompt` random tokens."""
    return {"batch": batch, "prompt": prompt, **measure_prompts(llm, [prompt] * batch, sampling)}


def measure_prompts(llm: LLM, lengths: Sequence[int], sampling: SamplingParams) -> dict[str, Any]:
    """What the second of two generations took, all requests at once.

    Arguments:
    - `lengths`: tokens of each prompt, which are random ids of the lower half of the vocabulary.
    - `sampling`: of all requests, without `early_stop`.

    Returns the settings, tokens/s, seconds, the steps of a request, and the evaluations of the device.
    """
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, llm.config.vocab_size // 2, length) for length in lengths]
    seconds, before = 0.0, 0
    for _ in range(2):
        before, start = llm._engine.evaluated, time.perf_counter()
        outputs = llm.generate(prompt_token_ids=prompts, sampling=sampling)
        seconds = time.perf_counter() - start
    return {
        "cache": sampling.cache,
        "retention": sampling.effective("retention") if _selects(sampling.cache) else 1.0,
        "delay": sampling.refresh_delay,
        "tokens_s": len(lengths) * sampling.gen_length / seconds,
        "seconds": seconds,
        "steps": outputs[0].nfe,
        "evaluated": llm._engine.evaluated - before,
        "steps_ms": 1e3 * seconds / outputs[0].nfe,
    }


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--cache", nargs="+", choices=get_args(Cache), default=["dual"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, nargs="+", default=[512])
    parser.add_argument("--retention", type=float, default=0.5)
    parser.add_argument("--delay", type=int, nargs="+", help="of the refresh; by default that of the policy")
    parser.add_argument("--steps", type=int, default=GEN_LENGTH, help="denoising steps of a request")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = Transformer(SHAPES[args.shape], rngs=nnx.Rngs(0), dtype="bfloat16")
    rows = max(args.batch) * (max(args.prompt) + GEN_LENGTH)
    llm = LLM(model, max_num_batched_tokens=rows, progress=False)
    table = []
    for cache, batch, prompt, delay in itertools.product(
        args.cache, args.batch, args.prompt, args.delay or [None]
    ):
        sampling = generation(cache, args.retention, delay, args.steps)
        table.append({"shape": args.shape, **measure(llm, batch, prompt, sampling)})
        print(json.dumps(table[-1]), flush=True)
    kinds = ("-".join(map(str, kind)) for kind in (args.cache, args.batch, args.prompt))
    record("generate_{}_{}_b{}_p{}".format(args.shape, *kinds), table, args.out)


if __name__ == "__main__":
    main()
