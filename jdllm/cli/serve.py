"""`jdllm serve`: an HTTP server with OpenAI's API and a page."""

import contextlib
import sys
from typing import TYPE_CHECKING

from jdllm.cli.asked_server import AskedServer
from jdllm.cli.compiling import told_of_compiling
from jdllm.cli.engine import ModelArgument, ModelOptions, takes_model
from jdllm.cli.groups import takes_groups
from jdllm.cli.replicas import serve_replicas
from jdllm.cli.report import print_result
from jdllm.cli.serve_options import Address, Browsers, Certificate, Keys, Limits, Replicas, Start, Taken
from jdllm.errors import ConfigError

if TYPE_CHECKING:
    from jdllm.api.server import Tls


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
    replicas: Replicas,
    source: ModelOptions,
) -> None:
    """Serve a model over HTTP: OpenAI's completions and chat, infilling, scores, metrics, and a page at /.

    On a GPU the port answers once all steps are compiled, on a CPU once the weights are there. A first
    SIGTERM or Ctrl-C finishes what runs, a second one stops at once.
    """
    asked = AskedServer(address.host, limits, keys, start, browsers, taken, source)
    asked.check()
    tls = _tls(certificate)
    if replicas.several:
        serve_replicas(asked, replicas, address.port, tls)
        return
    from jdllm.api.server import bind, serve

    with bind(address.host, address.port) as bound, contextlib.ExitStack() as stack:
        settings, llm = asked.settings(), asked.load()

        def prepare() -> None:
            asked.warm_up(llm)
            stack.enter_context(told_of_compiling())
            scheme, (host, port, *_) = "https" if tls else "http", bound.getsockname()
            print_result(f"{settings.names[0]} at {scheme}://{host}:{port}")

        sys.exit(serve(llm, settings, asked.access(), bound, tls, prepare))


def _tls(certificate: Certificate) -> "Tls | None":
    """The files for TLS; raises `ConfigError` where they cannot be used."""
    from jdllm.api.server import Tls

    certfile, keyfile = certificate.ssl_certfile, certificate.ssl_keyfile
    if certfile is None and keyfile is None:
        return None
    if certfile is None or keyfile is None:
        raise ConfigError("--ssl-certfile and --ssl-keyfile go together: give both")
    tls = Tls(certfile, keyfile)
    tls.check()
    return tls
