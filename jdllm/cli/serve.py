"""`jdllm serve`: an HTTP server with OpenAI's API and a page."""

import contextlib
import dataclasses
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jdllm.cli.compiling import told_of_compiling
from jdllm.cli.engine import ModelArgument, ModelOptions, as_arguments, asked_sampling, takes_model
from jdllm.cli.groups import takes_groups
from jdllm.cli.options import parse_prefilling
from jdllm.cli.report import print_result
from jdllm.cli.serve_options import Address, Browsers, Certificate, Keys, Limits, Start, Taken
from jdllm.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from jdllm.decoding.prefilling import Prefilling
    from jdllm.decoding.sampling import SamplingParams
    from jdllm.llm import LLM
    from jdllm.planning.account import Account

_NEEDED = ("fastapi", "uvicorn", "uvloop", "prometheus_client")
_NEEDED_TO_TRACE = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
_REQUESTS = (1024, 4096, 16384)
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_EVERYWHERE = ("0.0.0.0", "::")
_HOST = re.compile(r"[\w.-]+|\[[0-9a-fA-F:.]+\]")
_ORIGIN = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d+)?")
_URL = re.compile(r"https?://[^\s/]+(/\S*)?")
BUNDLED = "jdllm-demo"
_COLD = "nothing is compiled beforehand: the first requests of a size wait for that (--warmup)"


@takes_model
@takes_groups
def serve(
    model: ModelArgument = None,
    *,
    address: Address,
    limits: Limits,
    keys: Keys,
    start: Start,
    browsers: Browsers,
    taken: Taken,
    certificate: Certificate,
    source: ModelOptions,
) -> None:
    """Serve a model over HTTP: OpenAI's completions and chat, infilling, scores, metrics, and a page at /.

    On a GPU the port answers once all steps are compiled, on a CPU once the weights are there. A first
    SIGTERM or Ctrl-C finishes what runs, a second one stops at once.
    """
    check_installed("serving", *_NEEDED)
    _check_tracing(taken.otlp_traces_endpoint)
    certfile, keyfile = certificate.ssl_certfile, certificate.ssl_keyfile
    if (certfile is None) != (keyfile is None):
        raise ConfigError("--ssl-certfile and --ssl-keyfile go together: give both")
    if start.prefilling is not None and start.warmup is False:
        raise ConfigError("--prefilling is for the warm-up: leave it or --no-warmup out")
    from jdllm.api.app import Access
    from jdllm.api.server import Tls, bind, serve
    from jdllm.api.service import Settings
    from jdllm.demo.examples import EXAMPLES
    from jdllm.llm import LLM

    tls = None if certfile is None or keyfile is None else Tls(certfile, keyfile)
    if tls is not None:
        tls.check()
    long_settings = None if start.prefilling is None else parse_prefilling(start.prefilling)
    given, names = _given_sampling(start.default_sampling), names_of(start.served_model_name, source.model)
    access = Access(
        api_keys=_keys(keys.api_key or []),
        admin_key=None if keys.admin_key is None else _keys([keys.admin_key])[0],
        allowed_hosts=_hosts(address.host, browsers.allowed_host or []),
        cors_origins=_origins(browsers.cors_origin or []),
    )
    with bind(address.host, address.port) as bound, contextlib.ExitStack() as stack:
        arguments = as_arguments(source)
        default = _asked(source, given)
        llm = LLM(**arguments)
        settings = Settings(
            names=names,
            default_sampling=default,
            examples=EXAMPLES if source.model is None else {},
            **dataclasses.asdict(limits),
            **dataclasses.asdict(taken),
        )
        print_result(describe_account(llm.account))
        warms = start.warmup
        if warms is None:
            warms = llm.executables.platform != "cpu" or long_settings is not None

        def prepare() -> None:
            print_result(_warmed(llm, long_settings) if warms else _COLD)
            stack.enter_context(told_of_compiling())
            scheme, (host, port, *_) = "https" if certfile else "http", bound.getsockname()
            print_result(f"{settings.names[0]} at {scheme}://{host}:{port}")

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


def check_installed(what: str, *needed: str, extra: str = "serve") -> None:
    """Raise `ConfigError` where packages of an extra are missing that `what` needs."""
    if missing := [name for name in needed if not _is_installed(name)]:
        raise ConfigError(f"{what} needs {', '.join(missing)}: install the extra, as in jdllm[{extra}]")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def _check_tracing(endpoint: str | None) -> None:
    """Raise `ConfigError` where spans cannot be sent to `endpoint`."""
    if endpoint is None:
        return
    if not _URL.fullmatch(endpoint):
        raise ConfigError(
            f"--otlp-traces-endpoint is {endpoint!r}, expected a URL such as http://localhost:4318/v1/traces"
        )
    check_installed("--otlp-traces-endpoint", *_NEEDED_TO_TRACE, extra="otel")


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
