"""What the engine costs beside the device, and what becomes of it over thousands of requests."""

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32

from benchmarks.cases import case_parser
from benchmarks.checkpoints import status_bytes
from benchmarks.generations import GEN_LENGTH, generation, random_prompts
from benchmarks.record import print_row, record
from benchmarks.shapes import SHAPES
from jdllm.compiling.executables import Executable, Executables
from jdllm.decoding.registry import cache_names
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo import checkpoint_path
from jdllm.execution.module import Transformer
from jdllm.llm import LLM

MIB = 2**20
_SMALL_BYTES = 1 << 16
_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class DeviceTime:
    """What the calls of executables took.

    - `calls`: how many there were.
    - `seconds`: of the device.
    - `host_seconds`: of calls with the same arguments and next to nothing to compute.
    """

    calls: int = 0
    seconds: float = 0.0
    host_seconds: float = 0.0


@contextlib.contextmanager
def one_by_one() -> Iterator[DeviceTime]:
    """Let every executable of jdllm run alone meanwhile, and add up the device's time.

    A call starts when all its arguments are there and ends when its results are. What the call itself costs
    is that of a twin that takes the same arguments, and is taken off. Nothing overlaps here, so the sum is
    the device's work however much of it overlaps with the host's elsewhere. It assumes that the device runs
    one executable at a time, each as fast alone as behind another; a wait of the device for the host in the
    middle of an executable counts as the device's.
    """
    total, twins, call = DeviceTime(), dict[int, tuple[Executable, Executable]](), Executable.__call__

    def timed(executable: Executable, *args: Any) -> tuple[Any, float]:
        start = time.perf_counter()
        results = jax.block_until_ready(call(executable, *args))
        return results, time.perf_counter() - start

    def measured(executable: Executable, *args: Any) -> Any:
        jax.block_until_ready(args)
        if id(executable) not in twins:
            platform = jax.default_backend()
            twins[id(executable)] = executable, Executables(platform).compile(_next_to_nothing, *args)
            timed(twins[id(executable)][1], *args)
        _, idle = timed(twins[id(executable)][1], *args)
        results, seconds = timed(executable, *args)
        total.calls += 1
        total.seconds += max(0.0, seconds - idle)
        total.host_seconds += idle
        return results

    with mock.patch.object(Executable, "__call__", measured):
        yield total


def _next_to_nothing(*args: Any) -> Float32[Array, ""]:
    """A number that depends on all small arguments, so that they are sent."""
    leaves = jax.tree.leaves(args)
    small = [x for x in leaves if x.nbytes <= _SMALL_BYTES and jnp.issubdtype(x.dtype, np.number)]
    return jnp.stack([jnp.float32(0), *(x.ravel()[:1].sum().astype(jnp.float32) for x in small)]).sum()


def measure_overhead(
    llm: LLM, lengths: Sequence[int], sampling: SamplingParams, repeats: int = 3
) -> dict[str, Any]:
    """Seconds of a generation, of the device in it, and the share of the difference.

    Arguments:
    - `lengths`: tokens of each prompt.
    - `sampling`: of all requests, without `early_stop`.
    - `repeats`: generations behind a first one that compiles; their median counts.
    """
    prompts = random_prompts(llm.config, lengths)
    times, before = [], 0
    for _ in range(1 + repeats):
        before, start = llm.engine.evaluated, time.perf_counter()
        llm.generate(prompt_token_ids=prompts, sampling=sampling)
        times.append(time.perf_counter() - start)
    evaluated = llm.engine.evaluated - before
    with one_by_one() as device:
        llm.generate(prompt_token_ids=prompts, sampling=sampling)
    seconds = statistics.median(times[1:])
    return {
        "seconds": seconds,
        "device_s": device.seconds,
        "overhead": 1 - device.seconds / seconds,
        "calls": device.calls,
        "host_ms_a_call": 1e3 * device.host_seconds / device.calls,
        "evaluated": evaluated,
        "evaluated_alone": llm.engine.evaluated - before - evaluated,
    }


def overhead(arguments: Sequence[str]) -> None:
    """The share of a generation's time in which the device does not compute.

    `python3 -m benchmarks overhead [--batch 1 16 32] [--prompt 512] [--cache dual]` on a card: seconds of
    whole generations, 256 tokens in 256 steps in blocks of 32, beside what their executables take one by one.
    A call of an executable starts when its arguments are there and ends when its results are; what the call
    costs the host is measured with a twin that has next to nothing to compute. That assumes that the device
    runs one executable at a time, each as fast alone as behind another. `evaluated_alone`
    must be `evaluated`.
    """
    parser = case_parser("overhead", overhead.__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--cache", choices=cache_names(), default="dual")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    args = parser.parse_args(arguments)
    model = Transformer(SHAPES[args.shape], rngs=nnx.Rngs(0), dtype="bfloat16")
    sampling, table = generation(args.cache, 0.5, None), []
    with LLM(model, max_num_batched_tokens=args.max_num_batched_tokens, progress=False) as llm:
        for batch in args.batch:
            asked = {"shape": args.shape, "batch": batch, "prompt": args.prompt, "cache": args.cache}
            table.append(asked | measure_overhead(llm, [args.prompt] * batch, sampling))
            print_row(table[-1])
    record(
        f"overhead_{args.shape}_{args.cache}",
        table,
        args.out,
        gen_length=GEN_LENGTH,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )


RULES: tuple[dict[str, Any], ...] = (
    {},
    {"remasking": "random"},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.05},
    {"transfer": "threshold", "threshold": 0.9},
    {"transfer": "factor", "factor": 1.0},
    {"transfer": "entropy_bound", "entropy_bound": 0.1},
    {"transfer": "margin"},
)
SHORTEST = 5


def draw_requests(
    rng: np.random.Generator, count: int, longest: int
) -> tuple[list[int], list[SamplingParams]]:
    """Lengths of prompts, log-uniform up to `longest`, and for each a rule, a cache, blocks and a seed."""
    kinds = list(itertools.product(RULES, cache_names()))
    lengths = np.exp(rng.uniform(np.log(SHORTEST), np.log(longest + 1), count)).astype(int)
    sampling = []
    for place in rng.integers(0, len(kinds), count):
        rule, cache = kinds[place]
        block = int(rng.choice((4, 8, 16, 32)))
        sampling.append(
            SamplingParams(
                gen_length=block * int(rng.integers(1, 1 + 64 // block)),
                block_length=block,
                cache=cache,
                seed=int(rng.integers(2**31)),
                **rule,
            )
        )
    return lengths.tolist(), sampling


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """The seconds of every compilation of the process meanwhile, as JAX tells them."""
    found: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILED:
            found.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def serve(
    llm: LLM, portions: int, requests: int, longest: int, *, same: bool = False
) -> Iterator[dict[str, Any]]:
    """Generate so many portions of random requests, one after the other.

    Arguments:
    - `requests`: of a portion, all at once.
    - `longest`: tokens of the longest prompt.
    - `same`: the same requests in every portion.

    Yields for each portion its seconds, the compilations in it, and what host and device hold afterwards.
    """
    for portion in range(portions):
        rng = np.random.default_rng(0 if same else portion)
        lengths, sampling = draw_requests(rng, requests, longest)
        prompts = random_prompts(llm.config, lengths)
        start = time.perf_counter()
        with compilations() as compiled:
            llm.generate(prompt_token_ids=prompts, sampling=sampling)
        memory = jax.devices()[0].memory_stats() or {}
        yield {
            "portion": portion,
            "requests": requests,
            "seconds": time.perf_counter() - start,
            "compiled": len(compiled),
            "compile_s": sum(compiled),
            "host_mib": status_bytes("VmRSS") / MIB,
            "arrays_mib": sum(array.nbytes for array in jax.live_arrays()) / MIB,
            **({"device_mib": memory["bytes_in_use"] / MIB} if "bytes_in_use" in memory else {}),
        }


def grown(rows: Sequence[dict[str, Any]], column: str) -> float:
    """How much more the last quarter of `rows` holds than the second, by medians; 0 of fewer than eight."""
    quarter = len(rows) // 4
    if quarter < 2:
        return 0.0
    values = [row[column] for row in rows]
    return statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter])


def traffic(arguments: Sequence[str]) -> None:
    """Requests of random lengths, rules and caches through one engine: what compiles, and what memory grows.

    `python3 -m benchmarks traffic [--portions 5] [--requests 250] [--longest 400] [--same] [--shape SHAPE]`,
    by default with the bundled model. The first portion warms up, or `--warmup` does so before
    it. `grown_mib` is how much more the last quarter of the portions holds than the second; it needs eight
    portions or more.
    """
    parser = case_parser("traffic", traffic.__doc__)
    parser.add_argument("--shape", choices=SHAPES, help="random bf16 weights instead of the bundled model")
    parser.add_argument("--portions", type=int, default=5)
    parser.add_argument("--requests", type=int, default=250, help="of a portion")
    parser.add_argument("--longest", type=int, default=400, help="tokens of a prompt")
    parser.add_argument("--warmup", action="store_true", help="compile everything before the first request")
    parser.add_argument("--same", action="store_true", help="the same requests in every portion")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    args = parser.parse_args(arguments)
    model = checkpoint_path()
    if args.shape:
        model = Transformer(SHAPES[args.shape], rngs=nnx.Rngs(0), dtype="bfloat16")
    table, rows = [], args.max_num_batched_tokens
    with LLM(model, max_num_batched_tokens=rows, warmup=args.warmup, progress=False) as llm:
        for row in serve(llm, args.portions, args.requests, args.longest, same=args.same):
            table.append(row)
            print_row(row)
    grown_mib = {name: grown(table, name) for name in ("host_mib", "arrays_mib")}
    record(
        f"traffic_{args.shape or 'demo'}{'_same' * args.same}",
        table,
        args.out,
        compiled_after_the_first=sum(row["compiled"] for row in table[1:]),
        grown_mib=grown_mib,
        longest=args.longest,
        max_num_batched_tokens=rows,
        warmup=args.warmup,
    )
    print(f"compiled after the first portion: {sum(row['compiled'] for row in table[1:])}; grown {grown_mib}")
