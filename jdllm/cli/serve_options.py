"""The options of `jdllm serve` beside those of the model, in groups."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from jdllm.cli.groups import OptionGroup
from jdllm.cli.options import ServedNames, WarmPrefilling


@dataclasses.dataclass(frozen=True)
class Address(OptionGroup):
    """Where the server listens."""

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")] = 8000


@dataclasses.dataclass(frozen=True)
class Limits(OptionGroup):
    """What requests may take; fields of `jdllm.api.service.Settings`."""

    max_queue: Annotated[
        int, typer.Option(min=1, help="Requests that may wait; further ones are answered with 429.")
    ] = 1024
    max_n: Annotated[int, typer.Option(min=1, help="Samples that a request may ask for of a prompt.")] = 128
    max_requests_per_key: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests, one for each sample, that who has a key may have waiting or running; further ones"
            " are answered with 429.",
            show_default="any number",
        ),
    ] = None
    request_timeout: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="SECONDS", help="What a request may take.", show_default="any time"),
    ] = None
    strict_fields: Annotated[
        bool,
        typer.Option("--strict-fields", help="Refuse requests with names that are no field, with 400."),
    ] = False


@dataclasses.dataclass(frozen=True)
class Keys(OptionGroup):
    """Who may ask."""

    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="JDLLM_API_KEY",
            help="A key that clients have to send; may be repeated. A process list shows options: prefer the"
            " environment variable.",
            show_default="none is needed",
        ),
    ] = None
    admin_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="JDLLM_ADMIN_KEY",
            help="A further key, which sees and ends the requests of all; the others only their own.",
        ),
    ] = None


@dataclasses.dataclass(frozen=True)
class Start(OptionGroup):
    """What the server begins with."""

    served_model_name: ServedNames = None
    default_sampling: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Sampling parameters where a request says nothing.",
            show_default="the checkpoint's",
        ),
    ] = None
    warmup: Annotated[
        bool | None,
        typer.Option(
            "--warmup/--no-warmup",
            help="Compile every step before the port answers, or what they need when they come.",
            show_default="--warmup on a GPU, --no-warmup on a CPU",
        ),
    ] = None
    prefilling: WarmPrefilling = None


@dataclasses.dataclass(frozen=True)
class Browsers(OptionGroup):
    """Whose pages and which names of the server browsers may use."""

    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="From whose pages browsers may ask, such as https://a.example, or * for any; may be"
            " repeated.",
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What clients may call this server in Host, beside its loopback names and --host, or * for"
            " anything; may be repeated.",
            show_default="anything where --host is 0.0.0.0 or ::",
        ),
    ] = None


@dataclasses.dataclass(frozen=True)
class Taken(OptionGroup):
    """What is taken, logged and traced; fields of `jdllm.api.service.Settings`."""

    allow_beyond_positions: Annotated[
        bool,
        typer.Option(
            "--allow-beyond-positions", help="Take sequences longer than the positions of the model, too."
        ),
    ] = False
    log_requests: Annotated[
        bool,
        typer.Option("--log-requests", help="Log answered requests too, not only refused ones."),
    ] = False
    log_prompts: Annotated[
        bool,
        typer.Option("--log-prompts", help="Log what clients write: prompts, and wrong values."),
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where spans of requests are sent, by OTLP over HTTP, such as"
            " http://localhost:4318/v1/traces. Needs the extra otel.",
        ),
    ] = None


@dataclasses.dataclass(frozen=True)
class Certificate(OptionGroup):
    """For TLS."""

    ssl_certfile: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate, for TLS.")] = None
    ssl_keyfile: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key.")] = None


@dataclasses.dataclass(frozen=True)
class Replicas(OptionGroup):
    """How many servers of the model there are."""

    replicas: Annotated[
        int,
        typer.Option(
            min=1,
            help="Servers of the model at one port, each in a process and on cards of its own. More than one"
            " need the extra ray.",
        ),
    ] = 1
    max_replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Servers that there may be while many requests wait or run; --replicas is then the least.",
            show_default="--replicas",
        ),
    ] = None
    target_ongoing_requests: Annotated[
        int,
        typer.Option(min=1, help="Requests of a server that wait or run; more of them start a further one."),
    ] = 32

    @property
    def most(self) -> int:
        """Servers that there may be."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def several(self) -> bool:
        """Whether there may be more than one server."""
        return self.most > 1 or self.replicas > 1
