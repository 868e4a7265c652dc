"""A served model under load, over HTTP, beside the same requests without a server."""

import argparse
import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.cases import case_parser
from benchmarks.generations import GEN_LENGTH, WORKLOAD
from benchmarks.record import print_row, record
from benchmarks.served_checkpoint import SERVED, write_served_checkpoint
from benchmarks.serving_loads import LOADS, SMALL, Load, capacities
from benchmarks.shapes import SHAPES
from benchmarks.static_batcher import BATCH
from jdllm.bench.workload import draw_prompts, parse_lengths, read_workload
from jdllm.demo import checkpoint_path
from jdllm.llm import LLM

_ADDRESS = re.compile(r" at (https?://\S+)")
_ROWS = re.compile(r"largest step, (\d+) rows")
_PAGES = re.compile(r"^(\d+) pages of")
DEMO, DIRECT = "demo", "LLM.generate"
CONTINUOUS = ("jdllm", "serve")
STATIC = ("benchmarks", "static_batcher")


@contextlib.contextmanager
def served(
    model: Path,
    max_num_batched_tokens: int | None,
    cache: Path,
    more: Sequence[str] = (),
    program: Sequence[str] = CONTINUOUS,
) -> Iterator[dict[str, Any]]:
    """A server of its own process; yields its address as `url`, packed `rows` of its largest step, `pages` of
    its KV pool, and `start_s` until it was ready.

    Arguments:
    - `more`: further options of the server.
    - `program`: the module that Python runs, and the command of it.

    Raises `RuntimeError` where it ends before.
    """
    options = ["--port", "0", "--cache-dir", str(cache), *more]
    if max_num_batched_tokens is not None:
        options += ["--max-num-batched-tokens", str(max_num_batched_tokens)]
    command = [sys.executable, "-m", *program, str(model), *options]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            told: dict[str, Any] = {}
            for line in process.stdout or ():
                print(f"  {line.rstrip()}", flush=True)
                if "Started server process" in line:
                    break
                for name, pattern in (("rows", _ROWS), ("pages", _PAGES), ("url", _ADDRESS)):
                    if found := pattern.search(line):
                        told[name] = found[1] if name == "url" else int(found[1])
            else:
                raise RuntimeError(f"the server ended with {process.wait()}")
            wait_for_health(told["url"])
            yield told | {"start_s": time.perf_counter() - start}
        finally:
            process.send_signal(signal.SIGTERM)
            for line in process.stdout or ():
                print(f"  {line.rstrip()}", flush=True)


def wait_for_health(url: str) -> None:
    """Wait until a server that has started answers; raises `RuntimeError` after ten seconds."""
    for _ in range(100):
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == HTTPStatus.OK:
                return
        time.sleep(0.1)
    raise RuntimeError(f"{url} does not answer")


def put_load(url: str, load: Load, gen_length: int) -> dict[str, Any]:
    """One row of the table: what `jdllm bench serve` measured."""
    command = ["bench", "serve", "--url", url, "--json", "--gen-length", str(gen_length)]
    command += ["--sampling", json.dumps(_asked(load, gen_length)), *load.arguments]
    done = subprocess.run(
        [sys.executable, "-m", "jdllm", *command], stdout=subprocess.PIPE, text=True, check=True
    )
    said = json.loads(done.stdout.splitlines()[-1])
    summary = said["summary"]
    row: dict[str, Any] = {
        "load": load.name,
        "delay": load.sampling.get("refresh_delay"),
        "stream": said["stream"],
    }
    row |= {name: summary[name] for name in ("requests", "completed", "failed", "other_length", "other_nfe")}
    row |= {"seconds": summary["duration"], "tokens_s": summary["generated_tokens_per_second"]}
    for name in ("latency", "time_to_first_block"):
        for part in ("mean", "std", "p50", "p99"):
            row[f"{name}_{part}_s"] = summary[name][part] if summary[name] else None
    row["first_half_s"], row["second_half_s"] = summary["halves"]
    server = said["server"] or {}
    return row | {"evaluated": server.get("evaluated"), "compiled": server.get("compiled")}


def put_loads(url: str, loads: Sequence[Load], gen_length: int) -> Iterator[dict[str, Any]]:
    """A row for each load, printed as soon as it is measured."""
    for load in loads:
        row = put_load(url, load, gen_length)
        print_row(row)
        yield row


def direct(llm: LLM, load: Load, gen_length: int) -> dict[str, Any]:
    """The requests of a load, all in one call of `LLM.generate`: the second of two times."""
    asked = {"gen_length": gen_length, "steps": None, "early_stop": False} | _asked(load, gen_length)
    sampling = llm.default_sampling().changed(**asked)
    prompts, seconds, before = _prompts(llm, load), 0.0, 0
    for _ in range(2):
        before, start = llm.engine.evaluated, time.perf_counter()
        llm.generate(prompt_token_ids=prompts, sampling=sampling)
        seconds = time.perf_counter() - start
    return {
        "load": load.name,
        "delay": load.sampling.get("refresh_delay"),
        "requests": len(prompts),
        "seconds": seconds,
        "tokens_s": len(prompts) * gen_length / seconds,
        "evaluated": llm.engine.evaluated - before,
    }


def _asked(load: Load, gen_length: int) -> dict[str, Any]:
    steps = {} if "transfer" in load.sampling else {"steps": gen_length}
    return {"block_length": 32} | steps | load.sampling


def _prompts(llm: LLM, load: Load) -> list[np.ndarray]:
    """The prompts that `jdllm bench serve` draws for a load."""
    tokenizer, config = llm.tokenizer, llm.config
    if tokenizer is None:
        raise RuntimeError("the checkpoint has no tokenizer")
    if load.requests is None:
        raise RuntimeError("the requests of a trace are sent as they arrive")
    named = frozenset(i for i in (config.eos_id, config.eot_id, config.mask_id) if i is not None)
    lengths = parse_lengths("40") if load.name == SMALL else read_workload(WORKLOAD).lengths
    return [np.array(ids) for ids in draw_prompts(lengths, load.requests, len(tokenizer), named, 0)]


def main(arguments: Sequence[str]) -> None:
    """A server in a process of its own, and `jdllm bench serve` against it, on the same host over HTTP.

    `python3 -m benchmarks serving [--loads delay_1 delay_0 ...] [--direct] [--shape llada-8b]` on a card, or
    with `--shape demo`, the bundled model. `--loads poisson_{0.25,0.5,1.0,1.5,2.0,2.5}` sweeps the rate of
    arrivals, and ends with the capacity: the highest rate at which the mean latency of the second half of the
    requests is at most 1.3 times that of the first half. Where something was compiled meanwhile, halves tell
    nothing of the load. `burst` replays a trace. With `--static` the same loads are put on a server of static
    batches too, behind the other's end; its answers come whole, so it has no times of first blocks. With
    `--direct` loads without arrivals of their own are measured through `LLM.generate` too, all requests in
    one call. Latencies count from a request's arrival. `seconds` is the span from the first arrival to the
    last end. `evaluated` are the forward evaluations of the device.
    """
    args = _parsed(arguments)
    gen_length = 64 if args.shape == DEMO else GEN_LENGTH
    if args.child:
        _measure_directly(args, gen_length)
        return
    loads = [LOADS[name] for name in args.loads]
    more = [] if args.max_num_logits is None else ["--max-num-logits", str(args.max_num_logits)]
    if any(load.lengths == "long" for load in loads):
        more.append("--allow-beyond-positions")
    with contextlib.ExitStack() as stack:
        scratch = args.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cache = scratch / "executables"
        model = checkpoint_path() if args.shape == DEMO else scratch / args.shape
        if not model.exists():
            write_served_checkpoint(model, SHAPES[args.shape])
        traced = [] if args.trace is None else ["--trace", str(args.trace)]
        with served(model, args.max_num_batched_tokens, cache, [*more, *traced]) as server:
            measured = {"HTTP": list(put_loads(server["url"], loads, gen_length))}
        if args.static:
            through, batch = f"static batches of {args.batch}", ["--batch", str(args.batch)]
            with served(model, args.max_num_batched_tokens, cache, [*more, *batch], STATIC) as static:
                whole = [load.whole for load in loads]
                measured[through] = list(put_loads(static["url"], whole, gen_length))
        if args.direct:
            measured[DIRECT] = list(_direct_rows(arguments, model, cache))
    _record(args, measured, server)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = case_parser("serving", main.__doc__)
    parser.add_argument("--shape", choices=(*SERVED, DEMO), default="llada-8b")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=["delay_1", "delay_0"])
    parser.add_argument("--max-num-batched-tokens", type=int, help="by default as many as the server chooses")
    parser.add_argument("--max-num-logits", type=int, help="by default as many as the server chooses")
    parser.add_argument("--static", action="store_true", help="against a server of static batches, too")
    parser.add_argument("--batch", type=int, default=BATCH, help="requests of a static batch")
    parser.add_argument(
        "--direct", action="store_true", help="without a server too, as far as that is defined"
    )
    parser.add_argument(
        "--directory", type=Path, help="where checkpoint and cache are kept, by default temporary"
    )
    parser.add_argument("--trace", type=Path, help="what the server does, for Perfetto and for simulate")
    parser.add_argument("--suffix", default="", help="of the record's name, such as _arrivals")
    parser.add_argument("--child", nargs=2, type=Path, help="measure without a server, and print lines")
    return parser.parse_args(arguments)


def _record(
    args: argparse.Namespace, measured: Mapping[str, Sequence[dict[str, Any]]], server: Mapping[str, Any]
) -> None:
    """Write the rows of each way that requests went, and say which rates were stable."""
    loads = [LOADS[name] for name in args.loads]
    capacity = {
        through: found
        for through, rows in measured.items()
        if through != DIRECT and (found := capacities(zip(loads, rows, strict=True)))
    }
    extra = {"capacity": capacity} if capacity else {}
    if args.max_num_logits is not None:
        extra["max_num_logits"] = args.max_num_logits
    record(
        f"serving_{args.shape}{args.suffix}",
        [
            {"shape": args.shape, "through": through, **row}
            for through, rows in measured.items()
            for row in rows
        ],
        args.out,
        max_num_batched_tokens=server["rows"],
        pages=server["pages"],
        start_s=server["start_s"],
        **extra,
    )
    for through, rates in capacity.items():
        for lengths, rate in rates.items():
            told = "no rate" if rate is None else f"{rate:g} a second"
            print(f"capacity, {through}, {lengths} lengths: {told}")


def _direct_rows(arguments: Sequence[str], model: Path, cache: Path) -> Iterator[dict[str, Any]]:
    """The rows of `_measure_directly`, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks", "serving", *arguments, "--child", str(model), str(cache)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            print_row(row)
            yield row


def _measure_directly(args: argparse.Namespace, gen_length: int) -> None:
    """Print a line of JSON for each load that is no open loop; equal ones once."""
    model, cache = args.child
    with LLM(
        model,
        warmup=True,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_logits=args.max_num_logits,
        cache_dir=cache,
        progress=False,
    ) as llm:
        loads = {(LOADS[name].name, str(LOADS[name].sampling)): LOADS[name] for name in args.loads}
        for load in loads.values():
            if not load.open:
                print(json.dumps(direct(llm, load, gen_length)), flush=True)
