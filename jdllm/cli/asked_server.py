"""What the options of `jdllm serve` ask for, whoever takes the connections."""

import dataclasses
import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jdllm.cli.engine import ModelOptions, asked_sampling, load_model
from jdllm.cli.options import parse_prefilling
from jdllm.cli.report import print_result
from jdllm.cli.serve_options import Browsers, Keys, Limits, Start, Taken
from jdllm.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from jdllm.api.app import Access
    from jdllm.api.service import Settings
    from jdllm.decoding.prefilling import Prefilling
    from jdllm.decoding.sampling import SamplingParams
    from jdllm.llm import LLM
    from jdllm.planning.account import Account

_NEEDED = ("fastapi", "uvicorn", "uvloop", "prometheus_client")
_NEEDED_TO_TRACE = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
_REQUESTS = (1024, 4096, 16384)
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
EVERYWHERE = ("0.0.0.0", "::")
"""Addresses of a server that listens at all that its machine has."""

_HOST = re.compile(r"[\w.-]+|\[[0-9a-fA-F:.]+\]")
_ORIGIN = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d+)?")
_URL = re.compile(r"https?://[^\s/]+(/\S*)?")
BUNDLED = "jdllm-demo"
_COLD = "nothing is compiled beforehand: the first requests of a size wait for that (--warmup)"


@dataclasses.dataclass(frozen=True)
class AskedServer:
    """The options of a server, beside its port and its certificate. It can be pickled.

    - `host`: the address that the server listens at.
    """

    host: str
    limits: Limits
    keys: Keys
    start: Start
    browsers: Browsers
    taken: Taken
    source: ModelOptions

    def check(self) -> None:
        """Raise `ConfigError` or `RequestError` for what is wrong whatever the model is."""
        check_installed("serving", *_NEEDED)
        _check_tracing(self.taken.otlp_traces_endpoint)
        if self.start.prefilling is not None and self.start.warmup is False:
            raise ConfigError("--prefilling is for the warm-up: leave it or --no-warmup out")
        self._prefilling()
        self._given_sampling()
        self.names()
        self.access()

    @property
    def cards(self) -> int:
        """Cards on which each step runs."""
        return self.source.given["devices"]

    def names(self) -> tuple[str, ...]:
        """What the model is called."""
        return names_of(self.start.served_model_name, self.source.model)

    def access(self) -> "Access":
        """Who may ask."""
        from jdllm.api.app import Access

        return Access(
            api_keys=_keys(self.keys.api_key or []),
            admin_key=None if self.keys.admin_key is None else _keys([self.keys.admin_key])[0],
            allowed_hosts=_hosts(self.host, self.browsers.allowed_host or []),
            cors_origins=_origins(self.browsers.cors_origin or []),
        )

    def settings(self) -> "Settings":
        """How the model is served. Raises as `asked_sampling` does; no weights are read."""
        from jdllm.api.service import Settings
        from jdllm.demo.examples import EXAMPLES

        return Settings(
            names=self.names(),
            default_sampling=_asked(self.source, self._given_sampling()),
            examples=EXAMPLES if self.source.model is None else {},
            **dataclasses.asdict(self.limits),
            **dataclasses.asdict(self.taken),
        )

    def load(self) -> "LLM":
        """Load the model, and print what the device holds. Raises as `LLM` does."""
        llm = load_model(self.source)
        print_result(describe_account(llm.account))
        return llm

    def warm_up(self, llm: "LLM") -> None:
        """Compile everything where that is asked for, and print what that took."""
        prefilling, warms = self._prefilling(), self.start.warmup
        if warms is None:
            warms = llm.executables.platform != "cpu" or prefilling is not None
        print_result(_warmed(llm, prefilling) if warms else _COLD)

    def ready(self) -> "tuple[LLM, Settings, Access]":
        """The model in full working order, how it is served, and who may ask."""
        settings, llm = self.settings(), self.load()
        self.warm_up(llm)
        return llm, settings, self.access()

    def _prefilling(self) -> "Prefilling | None":
        return None if self.start.prefilling is None else parse_prefilling(self.start.prefilling)

    def _given_sampling(self) -> dict[str, Any]:
        text = self.start.default_sampling
        if text is None:
            return {}
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise RequestError(f"--default-sampling is no JSON: {e}") from None
        if not isinstance(given, dict):
            raise RequestError("--default-sampling is no JSON object: expected one of sampling parameters")
        return given


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
    """What a model is called: as was said, else as its directory, its file or its id."""
    if given:
        if not all(name.strip() for name in given):
            raise ConfigError("--served-model-name is empty, expected what clients call the model")
        return tuple(given)
    if model is None:
        return (BUNDLED,)
    path = Path(model)
    return (path.resolve().name if path.exists() else model,)


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
    if "*" in given or (not given and listens in EVERYWHERE):
        return []
    return [*_LOOPBACK, f"[{listens}]" if ":" in listens else listens, *given]
