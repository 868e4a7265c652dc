"""What `jdllm serve --replicas` makes of its options, without Ray; tests/ray runs the replicas."""

import pickle
import pkgutil

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from jdllm.api.retries import Retries
from jdllm.cli import app
from jdllm.cli.replicas import asked_by
from jdllm.errors import ConfigError
from tests.cli.helpers import assert_mistake
from tests.helpers import ROOT


def serve(*options: str) -> Result:
    return CliRunner().invoke(app, ["serve", "--port", "0", *options])


@pytest.fixture
def ray_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is or not: nothing of it is imported."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


def test_without_the_extra_it_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name.startswith("ray") else name)
    for options in (["--replicas", "2"], ["--max-replicas", "2"]):
        assert_mistake(serve(*options), "--replicas needs ray.serve", "jdllm[ray]")


@pytest.mark.usefixtures("ray_is_there")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--replicas", "3", "--max-replicas", "2"], ["--max-replicas is 2", "at least the 3 of --replicas"]),
        (["--replicas", "2", "--trace", "a.json"], ["--trace is the file of one server"]),
        (["--replicas", "2", "--cors-origin", "a"], ["--cors-origin is 'a'"]),
        (["no/such/model", "--replicas", "2"], ["no/such/model"]),
    ],
)
def test_a_mistake_is_noticed_before_anything_starts(options: list[str], words: list[str]):
    assert_mistake(serve(*options), *words)


def test_a_configuration_has_the_options_of_the_command():
    asked = asked_by(
        {
            "model": "/models/a",
            "memory": "3GiB",
            "max-num-batched-tokens": 512,
            "strict-fields": True,
            "served-model-name": ["a", "b"],
            "api-key": "secret",
        }
    )
    assert (asked.source.model, asked.source.given["memory"]) == ("/models/a", "3GiB")
    assert asked.source.given["max_num_batched_tokens"] == 512
    assert (asked.limits.strict_fields, asked.limits.max_queue) == (True, 1024)
    assert asked.names() == ("a", "b")
    assert (asked.access().api_keys, asked.access().allowed_hosts) == (["secret"], [])
    assert pickle.loads(pickle.dumps(asked)) == asked


def test_a_configuration_without_options_has_the_bundled_model():
    assert asked_by({}).source.model is None


def test_kuberay_runs_what_is_tried_without_it():
    """tests/ray deploys docs/ray/serve.yaml."""
    tried = yaml.safe_load((ROOT / "docs" / "ray" / "serve.yaml").read_text())
    spec = yaml.safe_load((ROOT / "docs" / "ray" / "rayservice.yaml").read_text())["spec"]
    asked = yaml.safe_load(spec["serveConfigV2"])
    asked["applications"][0]["args"]["model"] = tried["applications"][0]["args"]["model"]
    assert asked == tried
    module, _, function = tried["applications"][0]["import_path"].partition(":")
    assert callable(pkgutil.resolve_name(f"{module}:{function}"))
    ray = spec["rayClusterConfig"]
    for group in [ray["headGroupSpec"], *ray["workerGroupSpecs"]]:
        [container] = group["template"]["spec"]["containers"]
        environment = {one["name"]: one.get("value") for one in container["env"]}
        callback = environment["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]
        [middleware] = pkgutil.resolve_name(callback)()
        assert middleware.cls is Retries


def test_a_mistake_of_a_configuration_is_one_of_the_command():
    with pytest.raises(ConfigError, match="--cors-origin is 'a'"):
        asked_by({"cors-origin": "a"})
    with pytest.raises(typer.TyperException, match="--no-such-option"):
        asked_by({"no-such-option": 3})
    with pytest.raises(typer.TyperException, match="--replicas"):
        asked_by({"replicas": 3})
