"""Several servers of a model, by Ray Serve: each is a replica, in a process and on cards of its own."""

import contextlib
import dataclasses
import logging.config
import os
import signal
import threading
from collections.abc import Callable

import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]
from starlette.types import ASGIApp

from jdllm.api.app import Access
from jdllm.api.served import LOGGING, served, settle
from jdllm.api.server import IDLE_SECONDS, Tls
from jdllm.api.service import Settings
from jdllm.errors import ConfigError
from jdllm.llm import LLM

NAME = "jdllm"
"""What Ray calls the application, and its only deployment."""

DRAIN_SECONDS = 120.0
"""How long a replica that is not needed any more has to finish what runs."""

_STARTS = 3
"""Times that a replica may fail to start before all are given up."""

Load = Callable[[], tuple[LLM, Settings, Access]]
"""Makes a model that is ready to be served, how it is served, and who may ask."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """How many replicas there are.

    - `least`, `most`: of them; requests decide between the two.
    - `requests`: that wait or run in a replica. More of them start a further replica.
    """

    least: int
    most: int
    requests: int


class Replica:
    """A server of a model, in a process that Ray has started. Ray's proxies hand it requests.

    Arguments:
    - `load`: makes the model, in this process.
    """

    def __init__(self, load: Load):
        logging.config.dictConfig(LOGGING)
        self._until_the_end = contextlib.ExitStack()
        self._app = self._until_the_end.enter_context(served(*load(), on_dead=_leave)).app
        settle()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """What answers requests, for Ray."""
        return self._app

    def __del__(self) -> None:
        """Close the model; Ray calls this once the replica has finished what ran."""
        self._until_the_end.close()


def _leave(_: Exception) -> None:
    """End a process whose engine cannot go on. Ray starts another, and its requests are asked again there."""
    os._exit(1)


def places(cards: int) -> int:
    """Replicas of so many cards each that the running Ray has room for; without cards one for each core."""
    resources = ray.cluster_resources()
    return int(resources.get("GPU", 0)) // cards if resources.get("GPU") else int(resources.get("CPU", 0))


def application(load: Load, scale: Scale, max_queue: int, cards: int = 1) -> serve.Application:
    """The replicas, for a running Ray to start.

    Arguments:
    - `load`: makes the model, in the process of each replica.
    - `scale`: how many replicas there are.
    - `max_queue`: requests that may wait in a replica.
    - `cards`: of each replica, where the machines have any.
    """
    options = {
        "name": NAME,
        "ray_actor_options": {"num_gpus": cards if ray.cluster_resources().get("GPU") else 0},
        # A replica refuses what it has no room for itself, and says when to come again.
        "max_ongoing_requests": 2 * max_queue,
        "max_constructor_retry_count": _STARTS,
        "graceful_shutdown_timeout_s": DRAIN_SECONDS,
        "logging_config": {"enable_access_log": False},  # jdllm logs requests itself
    }
    if scale.least == scale.most:
        options["num_replicas"] = scale.least
    else:
        options["autoscaling_config"] = {
            "min_replicas": scale.least,
            "max_replicas": scale.most,
            "target_ongoing_requests": scale.requests,
        }
    return serve.deployment(serve.ingress()(Replica)).options(**options).bind(load)


def run(app: serve.Application, host: str, port: int, tls: Tls | None, ready: Callable[[], None]) -> None:
    """Serve until a signal comes: a first one lets what runs finish, a second one ends it.

    Arguments:
    - `app`: of `application`.
    - `host`, `port`: where Ray's proxies listen.
    - `tls`: for HTTPS.
    - `ready`: called once all replicas answer.

    Raises `ConfigError` where they cannot be started.
    """
    options = {"host": host, "port": port, "keep_alive_timeout_s": IDLE_SECONDS}
    if tls is not None:
        options |= {"ssl_certfile": str(tls.certificate), "ssl_keyfile": str(tls.key)}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            serve.start(http_options=options)
            serve.run(app, name=NAME)
            ready()
            threading.Event().wait()
        except RuntimeError as error:
            raise ConfigError(f"the replicas do not start: {_raised() or error}") from None
        except KeyboardInterrupt:
            _drain()


def _raised() -> str:
    """What the last replica has raised that did not start: the last line of what Ray knows of it."""
    app = serve.status().applications.get(NAME)
    return "" if app is None else app.deployments[NAME].message.strip().rpartition("\n")[2]


def _drain() -> None:
    """Finish what runs, as long as replicas may take to."""
    while True:
        with contextlib.suppress(TimeoutError):  # Ray's patience ends before theirs
            serve.delete(NAME)
            return
