"""What the first calls of a new process take, with the library's defaults; prints a line of JSON for each.

It imports nothing of the benchmarks: `first_calls` runs it by its path, against the jdllm of any checkout.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdllm import LLM, SamplingParams
from jdllm.checkpoints.loading import load_params, resolve_dtype
from jdllm.demo import checkpoint_path
from jdllm.models.hf_config import config_from_hf

BLOCK = 32
RAGGED = Path(__file__).parent / "workloads" / "ragged32.json"
CALLS: dict[str, tuple[list[int], Any]] = {
    "uncached": ([512], "none"),
    "dual": ([512], "dual"),
    "dual, 16": ([512] * 16, "dual"),
    "dual, ragged 32": (json.loads(RAGGED.read_text())["prompt_lengths"], "dual"),
}
"""Tokens of the prompts of each call, and its cache."""


def timed(run: Callable[..., Any], *args: Any, **options: Any) -> tuple[float, Any]:
    """Seconds, and what `run(*args, **options)` returns."""
    start = time.perf_counter()
    result = jax.block_until_ready(run(*args, **options))
    return time.perf_counter() - start, result


def load(directory: Path) -> Any:
    config = config_from_hf(directory)
    return load_params(directory, config, resolve_dtype(directory, config, "auto"))


def main(directory: Path) -> None:
    load(checkpoint_path())  # starts the device
    load_s, params = timed(load, directory)
    del params
    llm_s, llm = timed(LLM, directory, progress=False)
    rng = np.random.default_rng(0)
    for name, (lengths, cache) in CALLS.items():
        sampling = SamplingParams(gen_length=BLOCK, block_length=BLOCK, cache=cache, early_stop=False)
        prompts = [rng.integers(0, llm.config.vocab_size // 2, length) for length in lengths]
        before = llm.executables.compiled, llm.executables.loaded
        first_s, _ = timed(llm.generate, prompt_token_ids=prompts, sampling=sampling)
        row = {
            "call": name,
            "load_s": load_s,
            "llm_s": llm_s,
            "first_s": first_s,
            "compiled": llm.executables.compiled - before[0],
            "loaded": llm.executables.loaded - before[1],
            "again_s": timed(llm.generate, prompt_token_ids=prompts, sampling=sampling)[0],
        }
        print(json.dumps(row | {"beyond_load_s": llm_s - load_s + first_s}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
