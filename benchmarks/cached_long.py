"""Requests with a cache and a long context: time and memory of a block at the end, beside what is planned."""

import itertools
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from benchmarks.apart import record_apart
from benchmarks.cases import case_parser
from benchmarks.generations import random_prompts
from benchmarks.shapes import SHAPES
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.pallas.device import target
from jdllm.pallas.masked_logits import Level
from jdllm.planning.account import Account
from jdllm.planning.answer import Report, make_report
from jdllm.planning.budget import device_budget
from jdllm.planning.card import described_card
from jdllm.planning.layered import CACHES, Layered, plan_layered, retention_of
from jdllm.planning.plan import Workload
from jdllm.planning.question import StepQuestion
from jdllm.planning.step_needs import whole_bucket
from jdllm.planning.step_time import RATES, step_flops
from jdllm.serving.demands import Kind

GIB, BLOCK = 2**30, 32
_CARD = "h200"


class Asked(NamedTuple):
    """A request of a row: its tokens, the memory of the device, and its cache."""

    length: int
    memory: str
    cache: str


def parsed(request: str) -> Asked:
    """What a request says as `TOKENS@MEMORY` or `TOKENS@MEMORY:CACHE`."""
    length, _, rest = request.partition("@")
    memory, _, cache = rest.partition(":")
    return Asked(int(length), memory, cache or CACHES[0])


def planned(config: ModelConfig, asked: Asked) -> Report:
    """What the plan says of a refresh without host memory, in the budget that an `LLM` has of this device."""
    workload = Workload(config, "bfloat16", target(), cache_policy=asked.cache)
    budget = device_budget(jax.devices()[0], asked.memory, "0")
    assert budget is not None  # memory is said
    return make_report(StepQuestion(workload, described_card(_CARD), budget, asked.length, {}))


def case(shape: str, request: str, host: str, steps: int) -> dict[str, Any]:
    """One row of the table: a block of `BLOCK` tokens at the end of so many tokens.

    Arguments:
    - `request`: as `parsed` reads it.
    - `host`: host memory for keys.
    - `steps`: evaluations of the block.
    """
    asked, config = parsed(request), SHAPES[shape]
    report = planned(config, asked)
    model = Transformer(config, rngs=nnx.Rngs(0), dtype="bfloat16")
    options: Any = {"memory": asked.memory, "host_memory": host, **report.options}
    with LLM(model, **options, progress=False) as llm:
        plan = _in_pool(llm.account, asked) if report.refusal is None else _beyond_pool(llm, asked)
        sampling = SamplingParams(
            gen_length=BLOCK, block_length=BLOCK, steps=steps, cache=asked.cache, early_stop=False
        )
        times = [time.perf_counter()]
        [output] = llm.generate(
            prompt_token_ids=random_prompts(config, [asked.length - BLOCK]),
            sampling=sampling,
            on_step=lambda _: times.append(time.perf_counter()),
        )
        layered = llm.engine.stats().parts[Kind.LAYERED]
    seconds = [after - before for before, after in itertools.pairwise(times)]
    # A refresh is the first step of a block or, for sparse caches, the second one behind a full step.
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "shape": shape,
        "tokens": asked.length,
        "memory": asked.memory,
        "cache": asked.cache,
        "evaluations": output.nfe,
        "layered": layered,
        "refresh_s": max(seconds[:2]),
        "refresh_floor_s": step_flops(config, asked.length, BLOCK) / RATES[_CARD].flops,
        "reuse_s": statistics.median(seconds[2:]),
        **plan,
        "peak_gib": stats.get("peak_bytes_in_use", 0) / GIB,
    }


def _in_pool(account: Account, asked: Asked) -> dict[str, Any]:
    """What is planned of a request in the KV pool: all of the device without the CUDA context."""
    room, sharing = account.step_room(asked.length), account.sharing
    assert room is not None
    assert sharing is not None
    step = sharing.needs.refresh(whole_bucket(asked.length), room, Level.TOP).step_bytes
    return {"planned_gib": (account.weights + account.pool_bytes + step) / GIB}


def _beyond_pool(llm: LLM, asked: Asked) -> dict[str, Any]:
    """What is planned of a request whose keys are in host memory.

    Raises `SystemExit` where there is no room, or where requests with this cache keep to the pool.
    """
    retention = retention_of(SamplingParams(cache=asked.cache))  # pyright: ignore[reportArgumentType]
    found = Layered.of_account(llm.config, "bfloat16", llm.account, retention)
    layered = found if asked.cache in CACHES else None
    plan = None if layered is None else plan_layered(layered, asked.length, 0)
    if plan is None or layered is None:
        raise SystemExit(f"{asked.length} tokens have no room in {asked.memory} with cache {asked.cache}")
    return {
        "chunk": plan.layering.chunk,
        "kept": plan.layering.kept,
        "kept_behind": plan.layering.kept_behind,
        "streamed_gib": plan.streamed_bytes / GIB,
        "reuse_floor_s": plan.streamed_bytes / RATES[_CARD].host_bytes,
        "host_gib": plan.host_bytes / GIB,
        "planned_gib": (max(plan.prompt_bytes, plan.token_bytes) - layered.budget.overhead) / GIB,
    }


def main(arguments: Sequence[str]) -> None:
    """Time of a refresh and of the reuses of one request, by tokens@memory:cache.

    `python3 -m benchmarks cached_long [409600@24GiB 110592@24GiB:dual] [--shape dream-7b] [--steps 8]` on a
    card: a block of 32 tokens. A request that the KV pool holds runs there, with the options that
    `jdllm plan` names. With a dual or sparse cache a longer one runs layer by layer, with keys in host
    memory. A refresh is measured once, compiling included. Floors are the arithmetic of a refresh, and the
    time that the streamed keys take from pinned host memory in a reuse. Peaks are XLA's, without what is
    planned for the CUDA context; beyond the pool the plan leaves room for a step of others, which does not
    run here.
    Each request runs in a process of its own. What cannot run is named, and stops no other.
    """
    parser = case_parser("cached_long", main.__doc__)
    parser.add_argument("requests", nargs="*", default=["409600@24GiB", "110592@24GiB"])
    parser.add_argument("--shape", choices=SHAPES, default="dream-7b")
    parser.add_argument("--host-memory", default="64GiB")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--child", action="store_true", help="measure one request here, and print a line")
    args = parser.parse_args(arguments)
    if args.child:
        print(json.dumps(case(args.shape, args.requests[0], args.host_memory, args.steps)), flush=True)
        return
    record_apart("cached_long", args.requests, arguments, f"cached_long_{args.shape}", args.out)
