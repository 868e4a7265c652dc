"""`jdllm bench`: load on a server, measured by a client."""

import asyncio
import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import Progress

from jdllm.bench.form import check_sampling
from jdllm.bench.records import check_writable, read_records, write_records
from jdllm.bench.report import as_json as run_as_json
from jdllm.bench.report import compare as compared
from jdllm.bench.report import describe, describe_comparison
from jdllm.bench.trace import Trace, read_trace
from jdllm.bench.workload import Lengths, cycled, parse_lengths, read_workload
from jdllm.cli.groups import OptionGroup, takes_groups
from jdllm.cli.options import Json
from jdllm.cli.report import print_result
from jdllm.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from types import ModuleType

    from jdllm.bench.run import Options, Run

NOTHING_COMPLETED = 1
INTERRUPTED = 130
_REQUESTS = 32
_PROMPT_LENGTH = "512"
_GEN_LENGTH = 256

app = typer.Typer(rich_markup_mode=None, help="Measure a server.")


@app.callback()
def common() -> None:
    """Measure a server."""


@dataclasses.dataclass(frozen=True)
class Server(OptionGroup):
    """What is measured."""

    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000"
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its name there.", show_default="the first it lists")
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="JDLLM_API_KEY", metavar="KEY", help="Sent as a bearer token.", show_default=False
        ),
    ] = None
    endpoint: Annotated[str, typer.Option(metavar="completions|chat", help="Which API is asked.")] = (
        "completions"
    )


@dataclasses.dataclass(frozen=True)
class Pace(OptionGroup):
    """When requests are sent."""

    mode: Annotated[
        str | None,
        typer.Option(
            metavar="closed|open",
            help="Closed: so many requests at a time. Open: requests arrive as a Poisson process, or as"
            " --trace says, whether the server keeps up or not.",
            show_default="open with --trace, else closed",
        ),
    ] = None
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Requests at a time of a closed loop.", show_default="all at once"),
    ] = None
    rate: Annotated[
        float | None, typer.Option(help="Requests a second of an open loop.", show_default=False)
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help='Replay arrivals and lengths: {"at": SECONDS, "prompt_tokens": N, "gen_length": M} a line,'
            " in the order of at. gen_length may be left out.",
            show_default=False,
        ),
    ] = None


@dataclasses.dataclass(frozen=True)
class Work(OptionGroup):
    """What is asked for."""

    requests: Annotated[
        int | None,
        typer.Option(min=1, help="How many.", show_default=f"those of --lengths or --trace, or {_REQUESTS}"),
    ] = None
    warmup: Annotated[int, typer.Option(min=0, help="Requests before them that are not timed.")] = 0
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, prompts and arrivals.")] = 0
    prompt_length: Annotated[
        str | None,
        typer.Option(
            metavar="N|MIN:MAX|lognormal:MEAN:SIGMA",
            help="Tokens of the prompts: random ids of the vocabulary's lower half.",
            show_default=_PROMPT_LENGTH,
        ),
    ] = None
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help='{"prompt_lengths": [...]}, cycled; gen_length, steps and block_length too, where it has'
            " them and no option says otherwise.",
            show_default=False,
        ),
    ] = None
    gen_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens that each generates, whatever ends its text (ignore_eos).",
            show_default=f"that of --lengths or --trace, or {_GEN_LENGTH}",
        ),
    ] = None
    sampling: Annotated[
        str,
        typer.Option(metavar="JSON", help='Further fields of the requests, as \'{"cache": "dual"}\'.'),
    ] = "{}"
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Only streams tell of first texts and blocks.")
    ] = True
    stream_mode: Annotated[
        str, typer.Option(metavar="text|denoise", help="What is streamed: text, or every step.")
    ] = "text"
    vocab_size: Annotated[
        int | None, typer.Option(min=2, help="Ids of the model.", show_default="as the server says")
    ] = None


@app.command("serve")
@takes_groups
def serve(
    *,
    server: Server,
    pace: Pace,
    work: Work,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Where a record of each request goes.", show_default=False),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A B", help="Compare two runs by their --out files; runs nothing.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Put a load on a server and measure it: throughput, latency and time to the first block.

    Rates count generated tokens only, never those of prompts. What a server refuses or drops counts as
    failed. In an open loop latencies count from the arrival, not from when a request was sent. Ends with
    exit code 1 where no request was completed; after Ctrl-C it prints what there is, and ends with 130.
    """
    if compare is not None:
        _compare(compare, as_json)
        return
    bench = _bench()
    workload = _workload(work) if pace.trace is None else _replayed(pace.trace, pace, work)
    options = bench.Options(
        url=server.url,
        api_key=server.api_key or None,
        model=server.model,
        endpoint=_one_of("--endpoint", server.endpoint, "completions", "chat"),
        stream=_one_of("--stream-mode", work.stream_mode, "text", "denoise") if work.stream else None,
        requests=workload.requests,
        warmup=work.warmup,
        lengths=workload.lengths,
        gen_length=workload.gen_length,
        sampling=workload.sampling,
        seed=work.seed,
        rate=_rate(pace),
        concurrency=pace.concurrency,
        vocab_size=work.vocab_size,
        trace=workload.trace,
    )
    run = _measure(bench, options, out)
    print_result(json.dumps(run_as_json(options, run)) if as_json else describe(options, run))
    if run.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not any(record.status == "completed" for record in run.records):
        raise typer.Exit(NOTHING_COMPLETED)


class _Workload(NamedTuple):
    """How many requests, how long their prompts and answers are, their further fields, and when they arrive
    where a trace says so."""

    requests: int
    lengths: Lengths
    gen_length: int
    sampling: dict[str, Any]
    trace: Trace | None = None


def _workload(work: Work) -> _Workload:
    sampling = _sampling(work.sampling)
    if work.lengths is None:
        lengths = parse_lengths(work.prompt_length or _PROMPT_LENGTH)
        return _Workload(work.requests or _REQUESTS, lengths, work.gen_length or _GEN_LENGTH, sampling)
    if work.prompt_length is not None:
        raise RequestError("--lengths and --prompt-length both say how long prompts are: leave one out")
    found = read_workload(work.lengths)
    return _Workload(
        work.requests or found.count,
        found.lengths,
        work.gen_length or found.gen_length or _GEN_LENGTH,
        found.sampling | sampling,
    )


def _replayed(path: Path, pace: Pace, work: Work) -> _Workload:
    """The load of a trace."""
    for option, value, what in (
        ("--rate", pace.rate, "when requests arrive"),
        ("--requests", work.requests, "how many requests there are"),
        ("--prompt-length", work.prompt_length, "how long prompts are"),
        ("--lengths", work.lengths, "how long prompts are"),
    ):
        if value is not None:
            raise RequestError(f"--trace and {option} both say {what}: leave one out")
    sampling, trace = _sampling(work.sampling), read_trace(path)
    gen_length = work.gen_length or trace.shared_gen_length or _GEN_LENGTH
    if sampling.get("steps") is not None:
        if work.gen_length is None and len(set(trace.gen_lengths(gen_length))) > 1:
            raise RequestError(
                f"the requests of {path} differ in 'gen_length': --gen-length says how many tokens the"
                " 'steps' of --sampling are for"
            )
        trace.check_steps(sampling["steps"], gen_length)
    return _Workload(len(trace.arrivals), cycled(trace.prompt_lengths), gen_length, sampling, trace)


def _sampling(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise RequestError(f"--sampling is not JSON: {e}") from None
    if not isinstance(fields, dict):
        raise RequestError(f"--sampling is {text}, expected a JSON object")
    check_sampling(fields)
    return fields


def _rate(pace: Pace) -> float | None:
    """Poisson arrivals a second of an open loop, `None` for a closed one or a trace."""
    by_default = "closed" if pace.trace is None else "open"
    mode = by_default if pace.mode is None else _one_of("--mode", pace.mode, "closed", "open")
    if mode == "closed":
        if pace.trace is not None:
            raise RequestError("--trace is for --mode open: a closed loop has no arrivals")
        if pace.rate is not None:
            raise RequestError("--rate is for --mode open: a closed loop has --concurrency")
        return None
    if pace.trace is None and (pace.rate is None or not 0 < pace.rate < math.inf):
        raise RequestError("--mode open needs a --rate above 0, in requests a second, or a --trace")
    if pace.concurrency is not None:
        raise RequestError("--concurrency is for --mode closed: an open loop sends requests as they arrive")
    return pace.rate


def _one_of[T: str](option: str, value: str, *choices: T) -> T:
    for choice in choices:
        if value == choice:
            return choice
    raise RequestError(f"{option} is {value!r}, expected {' or '.join(choices)}")


def _bench() -> "ModuleType":
    """The part of `jdllm.bench` that needs an HTTP client."""
    try:
        from jdllm.bench import run
    except ModuleNotFoundError as e:
        if e.name != "httpx":
            raise
        raise ConfigError("jdllm bench serve needs httpx, which the extra 'serve' installs") from None
    return run


def _measure(bench: "ModuleType", options: "Options", out: Path | None) -> "Run":
    if out is not None:
        check_writable(out)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("requests", total=options.requests)
        run = asyncio.run(bench.run(options, lambda _: progress.advance(bar)))
    if out is not None:
        write_records(out, run.records)
    return run


def _compare(files: tuple[Path, Path], as_json: bool) -> None:
    first, second = map(read_records, files)
    if as_json:
        print_result(json.dumps(compared(first, second)))
    else:
        print_result(describe_comparison(first, second, (str(files[0]), str(files[1]))))
