"""`jdllm serve`: an HTTP server with OpenAI's API and a page."""

import contextlib
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jdllm.cli.compiling import told_of_compiling
from jdllm.cli.engine import ModelArgument, ModelOptions, as_arguments, asked_sampling, takes_model
from jdllm.cli.options import ServedNames, WarmPrefilling, parse_prefilling
from jdllm.cli.report import print_result
from jdllm.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from jdllm.decoding.prefilling import Prefilling
    from jdllm.decoding.sampling import SamplingParams
    from jdllm.llm import LLM
    from jdllm.planning.account import Account

_NEEDED = ("fastapi", "uvicorn", "uvloop", "prometheus_client")
_REQUESTS = (1024, 4096, 16384)
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_EVERYWHERE = ("0.0.0.0", "::")
_HOST = re.compile(r"[\w.-]+|\[[0-9a-fA-F:.]+\]")
_ORIGIN = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d+)?")
BUNDLED = "jdllm-demo"
_COLD = "nothing is compiled beforehand: the first requests of a size wait for that (--warmup)"


@takes_model
def serve(
    model: ModelArgument = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")
    ] = 8000,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Requests that may wait; further ones are answered with 429.")
    ] = 1024,
    max_n: Annotated[int, typer.Option(min=1, help="Samples that a request may ask for of a prompt.")] = 128,
    max_requests_per_key: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests, one for each sample, that who has a key may have waiting or running; further ones"
            " are answered with 429.",
            show_default="any number",
        ),
    ] = None,
    request_timeout: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="SECONDS", help="What a request may take.", show_default="any time"),
    ] = None,
    strict_fields: Annotated[
        bool,
        typer.Option("--strict-fields", help="Refuse requests with names that are no field, with 400."),
    ] = False,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="JDLLM_API_KEY",
            help="A key that clients have to send; may be repeated. A process list shows options: prefer the"
            " environment variable.",
            show_default="none is needed",
        ),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="JDLLM_ADMIN_KEY",
            help="A further key, which sees and ends the requests of all; the others only their own.",
        ),
    ] = None,
    served_model_name: ServedNames = None,
    default_sampling: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Sampling parameters where a request says nothing.",
            show_default="the checkpoint's",
        ),
    ] = None,
    warmup: Annotated[
        bool | None,
        typer.Option(
            "--warmup/--no-warmup",
            help="Compile every step before the port answers, or what they need when they come.",
            show_default="--warmup on a GPU, --no-warmup on a CPU",
        ),
    ] = None,
    prefilling: WarmPrefilling = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="From whose pages browsers may ask, such as https://a.example, or * for any; may be"
            " repeated.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What clients may call this server in Host, beside its loopback names and --host, or * for"
            " anything; may be repeated.",
            show_default="anything where --host is 0.0.0.0 or ::",
        ),
    ] = None,
    allow_beyond_positions: Annotated[
        bool,
        typer.Option(
            "--allow-beyond-positions", help="Take sequences longer than the positions of the model, too."
        ),
    ] = False,
    log_requests: Annotated[
        bool,
        typer.Option("--log-requests", help="Log answered requests too, not only refused ones."),
    ] = False,
    log_prompts: Annotated[
        bool,
        typer.Option("--log-prompts", help="Log what clients write: prompts, and wrong values."),
    ] = False,
    ssl_certfile: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate, for TLS.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key.")] = None,
    *,
    source: ModelOptions,
) -> None:
    """Serve a model over HTTP: OpenAI's completions and chat, infilling, scores, metrics, and a page at /.

    On a GPU the port answers once all steps are compiled, on a CPU once the weights are there. A first
    SIGTERM or Ctrl-C finishes what runs, a second one stops at once.
    """
    check_installed("serving", *_NEEDED)
    if (ssl_certfile is None) != (ssl_keyfile is None):
        raise ConfigError("--ssl-certfile and --ssl-keyfile go together: give both")
    if prefilling is not None and warmup is False:
        raise ConfigError("--prefilling is for the warm-up: leave it or --no-warmup out")
    from jdllm.api.app import Access
    from jdllm.api.server import Tls, bind, serve
    from jdllm.api.service import Settings
    from jdllm.demo.examples import EXAMPLES
    from jdllm.llm import LLM

    tls = None if ssl_certfile is None or ssl_keyfile is None else Tls(ssl_certfile, ssl_keyfile)
    if tls is not None:
        tls.check()
    long_settings = None if prefilling is None else parse_prefilling(prefilling)
    given, names = _given_sampling(default_sampling), names_of(served_model_name, source.model)
    access = Access(
        api_keys=_keys(api_key or []),
        admin_key=None if admin_key is None else _keys([admin_key])[0],
        allowed_hosts=_hosts(host, allowed_host or []),
        cors_origins=_origins(cors_origin or []),
    )
    with bind(host, port) as bound, contextlib.ExitStack() as stack:
        arguments = as_arguments(source)
        default = _asked(source, given)
        llm = LLM(**arguments)
        settings = Settings(
            names=names,
            default_sampling=default,
            max_queue=max_queue,
            max_n=max_n,
            max_requests_per_key=max_requests_per_key,
            request_timeout=request_timeout,
            log_requests=log_requests,
            log_prompts=log_prompts,
            allow_beyond_positions=allow_beyond_positions,
            strict_fields=strict_fields,
            examples=EXAMPLES if source.model is None else {},
        )
        print_result(describe_account(llm.account))
        warms = llm.executables.platform != "cpu" or prefilling is not None if warmup is None else warmup

        def prepare() -> None:
            print_result(_warmed(llm, long_settings) if warms else _COLD)
            stack.enter_context(told_of_compiling())
            scheme, (address, taken, *_) = "https" if ssl_certfile else "http", bound.getsockname()
            print_result(f"{settings.names[0]} at {scheme}://{address}:{taken}")

        sys.exit(serve(llm, settings, access, bound, tls, prepare))


def _warmed(llm: "LLM", prefilling: "Prefilling | None") -> str:
    """Compile everything; what that took."""
    done = llm.warmup(prefilling=prefilling)
    return f"ready in {done.seconds:.1f} s: compiled {done.compiled} executables and found {done.loaded}"


def describe_account(account: "Account") -> str:
    """What the device holds, line by line, and how many requests the KV pool has room for."""
    from jdllm.byte_sizes import format_bytes
    from jdllm.execution.paged.pool import PAGE_ROWS
    from jdllm.planning.budget import GUARD

    steps = [(f"step, {kind}", size) for kind, size in account.steps.items()]
    rows = [*account.table(), *steps]
    if account.budget is not None:
        rows.append(("guard band, of the overhead", GUARD))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {format_bytes(size):>12}" for name, size in rows]
    held = [(tokens, (account.pages - 1) // -(-tokens // PAGE_ROWS)) for tokens in _REQUESTS]
    listed = ", ".join(f"{count} of {tokens}" for tokens, count in held)
    lines.append(
        f"{account.pages - 1} pages of {PAGE_ROWS} tokens: requests of so many cached tokens: {listed}"
    )
    return "\n".join(lines)


def check_installed(what: str, *needed: str) -> None:
    """Raise `ConfigError` where packages are missing that `what` needs."""
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"{what} needs {', '.join(missing)}: install the extra, as in jdllm[serve]")


def names_of(given: Sequence[str] | None, model: str | None) -> tuple[str, ...]:
    """What a model is called: as was said, else as its directory or its id."""
    if given:
        if not all(name.strip() for name in given):
            raise ConfigError("--served-model-name is empty, expected what clients call the model")
        return tuple(given)
    if model is None:
        return (BUNDLED,)
    path = Path(model)
    return (path.resolve().name if path.is_dir() else model,)


def _given_sampling(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise RequestError(f"--default-sampling is no JSON: {e}") from None
    if not isinstance(given, dict):
        raise RequestError("--default-sampling is no JSON object: expected one of sampling parameters")
    return given


def _asked(source: ModelOptions, given: dict[str, Any]) -> "SamplingParams":
    try:
        return asked_sampling(source, given)
    except RequestError as e:
        raise RequestError(f"--default-sampling: {e}") from None


def _keys(given: Sequence[str]) -> list[str]:
    keys = [key.strip() for key in given]
    if any(not key or not key.isascii() for key in keys):
        raise ConfigError("an API key is empty or has other characters than ASCII")
    return keys


def _origins(given: Sequence[str]) -> list[str]:
    """Origins as browsers write them."""
    for origin in given:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origin is {origin!r}, expected a scheme and a host without a path, such as"
                " https://a.example or http://localhost:3000, or *"
            )
    return [origin.lower() for origin in given]


def _hosts(listens: str, given: Sequence[str]) -> list[str]:
    """Names that are answered, none for any: who listens at all addresses has names that nobody told."""
    for name in given:
        if name != "*" and not _HOST.fullmatch(name):
            raise ConfigError(f"--allowed-host is {name!r}, expected a name without a port, or *")
    if "*" in given or (not given and listens in _EVERYWHERE):
        return []
    return [*_LOOPBACK, f"[{listens}]" if ":" in listens else listens, *given]
