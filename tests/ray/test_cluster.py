"""A cluster of Ray that runs already: the configurations of docs/ray, more replicas and fewer."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
import yaml

from tests.clients.servers import ROWS, Server, until
from tests.helpers import ROOT
from tests.ray.asking import Asking, completed, replicas_of

PORT, DASHBOARD = 8391, 8392
URL = f"http://127.0.0.1:{PORT}"
BINARIES = Path(sys.executable).parent
SMALL = {"dtype": "float32", "max-num-batched-tokens": ROWS, "kv-pool": "128MiB"}
BY_SESSION = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
"""As docs/scaling.md has it."""

Deploy = Callable[[dict[str, Any]], None]


def configuration() -> dict[str, Any]:
    """docs/ray/serve.yaml with the bundled model, on the CPU."""
    found = yaml.safe_load((ROOT / "docs" / "ray" / "serve.yaml").read_text())
    found["http_options"] |= {"host": "127.0.0.1", "port": PORT}
    [app] = found["applications"]
    app["args"] = dict(SMALL)
    app["deployments"][0]["ray_actor_options"] = {"num_gpus": 0}
    return found


def replicas(count: int) -> dict[str, Any]:
    """The same with so many replicas. Requests of a session go to one of them."""
    found = configuration()
    [deployment] = found["applications"][0]["deployments"]
    del deployment["autoscaling_config"]
    deployment["num_replicas"] = count
    deployment["request_router_config"] = {"request_router_class": BY_SESSION}
    return found


@pytest.fixture(scope="module")
def cluster(pytestconfig: pytest.Config) -> Iterator[int]:
    """The process of a Ray with four cores; in its environment is what docs/scaling.md says."""
    assert pytestconfig.cache is not None
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(pytestconfig.cache.mkdir("ray")),
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "jdllm.api.retries.proxy_middlewares",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }
    with TemporaryDirectory(prefix="ray", dir="/tmp") as directory:  # paths of its sockets must be short
        options = ["--port", "8390", "--dashboard-port", str(DASHBOARD), "--num-cpus", "4"]
        options += ["--temp-dir", directory]
        ray = subprocess.Popen(
            [BINARIES / "ray", "start", "--head", "--block", *options],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        yield ray.pid
        ray.terminate()
        ray.wait(60.0)


@pytest.fixture(scope="module")
def deploy(cluster: int, tmp_path_factory: pytest.TempPathFactory) -> Deploy:
    """Runs `serve deploy`, and waits until the cluster has what a configuration asks for."""
    dashboard = f"http://127.0.0.1:{DASHBOARD}"
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}

    def running() -> bool:
        apps = httpx.get(f"{dashboard}/api/serve/applications/", trust_env=False).json()["applications"]
        told = {app["status"]: app["message"] for app in apps.values()}
        assert "DEPLOY_FAILED" not in told, told["DEPLOY_FAILED"]
        return set(told) == {"RUNNING"}

    def listens() -> bool:
        try:
            return httpx.get(f"{dashboard}/api/version", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def run(asked: dict[str, Any]) -> None:
        path = tmp_path_factory.mktemp("serve") / "serve.yaml"
        path.write_text(yaml.safe_dump(asked))
        until(listens, 60.0)
        command = [BINARIES / "serve", "deploy", "--address", dashboard, path]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        until(running, 120.0)

    return run


def test_a_session_has_one_replica(deploy: Deploy):
    deploy(replicas(2))
    with httpx.Client(base_url=URL, timeout=120.0, trust_env=False) as client:

        def finished(session: str) -> int:
            """Requests that the replica of a session has finished."""
            return client.get("/v1/stats", headers={"x-session-id": session}).json()["finished"]

        for _ in range(6):
            body = {"prompt": "1+1=", "max_tokens": 1}
            assert client.post("/v1/completions", json=body, headers={"x-session-id": "a"}).is_success
        assert [finished("a") for _ in range(6)] == [6] * 6
        assert {finished(str(number)) for number in range(20)} == {0, 6}


def test_fewer_replicas_finish_what_runs(cluster: int, deploy: Deploy, plain: Server):
    expected = completed(plain)
    deploy(replicas(2))
    before = replicas_of(cluster)
    asked = [Asking(URL, stream=stream) for stream in (True, False) * 4]
    until(lambda: all(one.begun for one in asked[::2]), 60.0)
    deploy(replicas(1))
    assert [one.done().completion() for one in asked] == [(expected, None)] * 8
    until(lambda: len(replicas_of(cluster)) == 1, 30.0)
    assert len(before) == 2
    assert set(replicas_of(cluster)) < set(before)


def test_an_engine_that_dies_takes_no_request_along(
    cluster: int, deploy: Deploy, plain: Server, tmp_path: Path
):
    expected = completed(plain)
    asked = replicas(1)
    asked["applications"][0] |= {"import_path": "tests.ray.dying:build", "args": {"died": f"{tmp_path}/died"}}
    deploy(asked)
    dying = replicas_of(cluster)
    assert Asking(URL).done().completion() == (expected, None)
    assert len(dying) == 1
    assert not set(dying) & set(replicas_of(cluster))
