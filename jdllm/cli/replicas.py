"""`jdllm serve --replicas`, and what `serve deploy` of Ray imports."""

import os
from typing import TYPE_CHECKING, Any

import typer

from jdllm.cli.asked_server import EVERYWHERE, AskedServer, check_installed
from jdllm.cli.engine import ModelArgument, ModelOptions, takes_model
from jdllm.cli.groups import takes_groups
from jdllm.cli.options import as_option
from jdllm.cli.report import print_result
from jdllm.cli.serve_options import Browsers, Keys, Limits, Replicas, Start, Taken
from jdllm.errors import ConfigError

if TYPE_CHECKING:
    from ray.serve import Application  # pyright: ignore[reportMissingImports]

    from jdllm.api.server import Tls

_ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "jdllm.api.retries.proxy_middlewares",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Of the processes of a Ray that this command starts: who asks again, and nobody is told of the use."""


def serve_replicas(asked: AskedServer, replicas: Replicas, port: int, tls: "Tls | None") -> None:
    """Serve a model by several servers, until a signal comes.

    Arguments:
    - `asked`: what each of them is.
    - `replicas`: how many there are.
    - `port`: 0 for any that is free.
    - `tls`: for HTTPS.

    Raises `ConfigError` where they cannot be started, and as `AskedServer.settings` does.
    """
    if replicas.most < replicas.replicas:
        raise ConfigError(
            f"--max-replicas is {replicas.most}, expected at least the {replicas.replicas} of --replicas"
        )
    _check(asked)
    name = asked.settings().names[0]
    from jdllm.api.server import bind

    with bind(asked.host, port) as bound:  # Ray says less where the port cannot be had
        port = bound.getsockname()[1]
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    import ray  # pyright: ignore[reportMissingImports]

    from jdllm.api.replicas import Scale, application, places, run

    ray.init(include_dashboard=False)
    room = places(asked.cards)
    if replicas.most > room:
        raise ConfigError(f"{replicas.most} replicas are asked for, and Ray has cards or cores for {room}")
    scale = Scale(replicas.replicas, replicas.most, replicas.target_ongoing_requests)
    url = f"{'https' if tls else 'http'}://{asked.host}:{port}"
    app = application(asked.ready, scale, asked.limits.max_queue, asked.cards)
    run(app, asked.host, port, tls, lambda: print_result(f"{name} at {url}"))


def build(options: dict[str, Any]) -> "Application":
    """The replicas that a configuration of Ray Serve asks for, as its `import_path`.

    Arguments:
    - `options`: as `asked_by` takes them. Ray has the address and the number of replicas.

    Raises `ConfigError` for what replicas cannot do, and as `asked_by` does.
    """
    asked = asked_by(options)
    _check(asked)
    from jdllm.api.replicas import Scale, application

    return application(asked.ready, Scale(1, 1, 1), asked.limits.max_queue, asked.cards)


def asked_by(options: dict[str, Any]) -> AskedServer:
    """The server that options ask for.

    Arguments:
    - `options`: of `jdllm serve`, by their names without the dashes before them, and `model`. `True` stands
      for a switch, and a list for an option that is repeated.

    Raises as the command does.
    """
    parser = typer.Typer(add_completion=False)
    parser.command()(_asked)
    typed: list[str] = []
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            said = [] if one is True else [str(one)]
            typed += said if name == "model" else [as_option(name), *said]
    return typer.main.get_command(parser).main(typed, standalone_mode=False)


@takes_model
@takes_groups
def _asked(
    model: ModelArgument = None,
    *,
    limits: Limits,
    keys: Keys,
    start: Start,
    browsers: Browsers,
    taken: Taken,
    source: ModelOptions,
) -> AskedServer:
    """The command whose options `asked_by` takes."""
    asked = AskedServer(EVERYWHERE[0], limits, keys, start, browsers, taken, source)
    asked.check()
    return asked


def _check(asked: AskedServer) -> None:
    """Raise `ConfigError` for what replicas cannot do."""
    check_installed("--replicas", "ray.serve", extra="ray")
    if asked.source.given["trace"] is not None:
        raise ConfigError("--trace is the file of one server: leave it or --replicas out")
