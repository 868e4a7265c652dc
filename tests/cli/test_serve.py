"""What `jdllm serve` makes of its options; the server itself is run by tests/clients."""

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner, Result

from jdllm.api import server
from jdllm.api.app import Access
from jdllm.api.service import Settings
from jdllm.byte_sizes import format_bytes
from jdllm.cli import app
from jdllm.cli.asked_server import BUNDLED
from jdllm.compiling.executables import Executables, Prepared
from jdllm.demo import checkpoint_path
from jdllm.llm import LLM
from tests.cli.helpers import QWEN2, assert_mistake
from tests.conftest import KV_POOL
from tests.helpers import GOLDENS, Golden


class Served(NamedTuple):
    """What the server was given."""

    llm: LLM
    settings: Settings
    access: Access
    port: int
    tls: Any


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Served]:
    """Nothing is compiled and nobody is served."""
    found: list[Served] = []

    def serve(
        llm: LLM,
        settings: Settings,
        access: Access,
        bound: socket.socket,
        tls: Any,
        prepare: Callable[[], None],
    ) -> int:
        prepare()
        found.append(Served(llm, settings, access, bound.getsockname()[1], tls))
        bound.close()
        return 0

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(LLM, "warmup", lambda self, prefilling: Prepared(3, 4, 1.5))
    monkeypatch.setenv("JDLLM_API_KEY", "")
    monkeypatch.delenv("JDLLM_API_KEY")
    return found


def serve(*options: str) -> Result:
    common = ["--port", "0", "--max-num-batched-tokens", "256", "--kv-pool", KV_POOL, "--cache-dir", "none"]
    return CliRunner().invoke(app, ["serve", *options, *common])


def test_the_account_stands_before_the_address(served: list[Served]):
    result = serve("--warmup")
    assert (result.exit_code, result.stderr) == (0, "")
    [one] = served
    lines = result.stdout.splitlines()
    assert lines[-1] == f"{BUNDLED} at http://127.0.0.1:{one.port}"
    assert lines[-2] == "ready in 1.5 s: compiled 3 executables and found 4"
    account = one.llm.account
    assert f"{account.pages - 1} pages of 64 tokens: " in result.stdout
    assert f"{(account.pages - 1) // 16} of 1024, {(account.pages - 1) // 64} of 4096" in result.stdout
    assert {line.split("  ")[0] for line in lines} >= {
        "weights",
        f"largest step, {account.rows} rows",
        "KV pool",
        "step, reuse",
    }


@pytest.mark.parametrize(
    ("options", "platform", "warm"),
    [
        ([], "cpu", False),
        ([], "cuda", True),
        (["--warmup"], "cpu", True),
        (["--no-warmup"], "cuda", False),
        (["--prefilling", "dream"], "cpu", True),
    ],
)
def test_it_is_warmed_up_on_a_card_or_where_that_is_asked_for(
    options: list[str], platform: str, warm: bool, served: list[Served], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Executables, "platform", property(lambda _: platform, lambda *_: None), raising=False)
    result = serve(*options)
    assert result.exit_code == 0
    assert ("ready in" in result.stdout) is warm
    assert ("nothing is compiled beforehand" in result.stdout) is not warm


@pytest.mark.slow
def test_a_server_reads_overrides_and_settings_of_long_contexts(served: list[Served]):
    overrides, fields = '{"max_sequence_length": 4096}', '{"chunk_length": 64, "chunks_kept": 2}'
    result = serve("--hf-overrides", overrides, "--prefilling", fields)
    assert (result.exit_code, result.stderr) == (0, "")
    assert served[0].llm.config.max_positions == 4096
    assert_mistake(serve("--prefilling", "nobody"), "--prefilling is 'nobody'")


def test_adaptive_defaults_need_a_verifier(served: list[Served]):
    result = serve("--default-sampling", '{"transfer": "adaptive"}')
    assert_mistake(result, "--default-sampling: ", "needs an autoregressive verifier", "--verifier")


def test_a_server_has_a_verifier(served: list[Served]):
    sampling = ["--default-sampling", '{"transfer": "adaptive", "max_lookahead": 8}']
    result = serve(str(Golden("dream").directory), "--verifier", str(QWEN2), *sampling)
    assert (result.exit_code, result.stderr) == (0, "")
    [one] = served
    assert one.settings.default_sampling.adaptive
    [line] = [line for line in result.stdout.splitlines() if line.startswith("verifier")]
    assert line.split("  ")[-1].strip() == format_bytes(one.llm.account.verifier)


def test_a_model_is_called_as_its_directory_or_as_was_said(served: list[Served]):
    directory = str(checkpoint_path())
    assert serve(directory).exit_code == 0
    assert serve(directory, "--served-model-name", "a", "--served-model-name", "b").exit_code == 0
    assert [one.settings.names for one in served] == [(checkpoint_path().name,), ("a", "b")]


def test_a_gguf_file_is_served_by_its_name(served: list[Served]):
    assert serve(str(GOLDENS / "quantised" / "llama.gguf")).exit_code == 0
    assert [one.settings.names for one in served] == [("llama.gguf",)]


def test_options_reach_the_server(served: list[Served], tmp_path: Path):
    pem = [tmp_path / name for name in ("certificate", "key")]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-subj", "/CN=localhost", "-out", str(pem[0]), "-keyout", str(pem[1])]
    subprocess.run(command, check=True, capture_output=True)
    options = {
        "max-queue": 5,
        "max-n": 3,
        "max-requests-per-key": 4,
        "request-timeout": 2.5,
        "cors-origin": "https://a.example",
        "api-key": "secret",
        "admin-key": "more-secret",
        "otlp-traces-endpoint": "http://localhost:4318/v1/traces",
    }
    files = ["--ssl-certfile", str(pem[0]), "--ssl-keyfile", str(pem[1])]
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    sampling = ["--default-sampling", '{"cache": "dual", "gen_length": 64}']
    result = serve(*given, *files, *sampling, "--strict-fields", "--allow-beyond-positions")
    assert result.exit_code == 0
    assert "https://127.0.0.1" in result.stdout
    assert "secret" not in result.output
    [one] = served
    assert (one.settings.max_queue, one.settings.request_timeout) == (5, 2.5)
    assert one.settings.otlp_traces_endpoint == "http://localhost:4318/v1/traces"
    assert one.settings.strict_fields
    assert one.settings.allow_beyond_positions
    assert (one.settings.max_n, one.settings.max_requests_per_key) == (3, 4)
    assert (one.access.api_keys, one.access.admin_key) == (["secret"], "more-secret")
    assert one.access.cors_origins == ["https://a.example"]
    assert (one.settings.default_sampling.cache, one.settings.default_sampling.gen_length) == ("dual", 64)
    assert list(one.tls) == pem


@pytest.mark.parametrize(
    ("options", "answered", "refused"),
    [
        ([], {"localhost", "127.0.0.1", "[::1]"}, {"a.example", "0.0.0.0"}),
        (["--allowed-host", "a.example", "--allowed-host", "b"], {"a.example", "b", "localhost"}, {"c"}),
        (["--host", "localhost"], {"localhost", "127.0.0.1"}, {"a.example"}),
        (["--host", "0.0.0.0", "--allowed-host", "a.example"], {"a.example", "127.0.0.1"}, {"b"}),
    ],
)
def test_a_server_answers_to_its_names(
    served: list[Served], options: list[str], answered: set[str], refused: set[str]
):
    assert serve(*options).exit_code == 0
    names = set(served[0].access.allowed_hosts)
    assert answered <= names
    assert not refused & names


@pytest.mark.parametrize("options", [["--host", "0.0.0.0"], ["--allowed-host", "*"]])
def test_a_server_may_answer_to_any_name(served: list[Served], options: list[str]):
    assert serve(*options).exit_code == 0
    assert not served[0].access.allowed_hosts


def test_keys_of_the_environment_stand_apart(served: list[Served], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JDLLM_API_KEY", "first second")
    assert serve().exit_code == 0
    assert served[0].access.api_keys == ["first", "second"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ssl-certfile", "x"], ["--ssl-keyfile"]),
        (["--ssl-certfile", "none.pem", "--ssl-keyfile", "none.key"], ["none.pem", "No such file"]),
        (["--ssl-certfile", __file__, "--ssl-keyfile", __file__], ["--ssl-certfile", "cannot be used"]),
        (["--default-sampling", "{"], ["--default-sampling", "JSON"]),
        (["--default-sampling", "[" * 100_000], ["--default-sampling", "JSON"]),
        (["--default-sampling", "[]"], ["--default-sampling", "object"]),
        (["--default-sampling", '{"cache": "none such"}'], ["--default-sampling", "cache"]),
        (["--api-key", " "], ["API key"]),
        (["--admin-key", " "], ["API key"]),
        (["--served-model-name", ""], ["--served-model-name"]),
        (["--served-model-name", "a", "--served-model-name", " "], ["--served-model-name"]),
        (["--cors-origin", "nonsense"], ["--cors-origin", "'nonsense'"]),
        (["--cors-origin", "https://a.example/"], ["--cors-origin", "path"]),
        (["--cors-origin", "https://a.example https://b.example"], ["--cors-origin"]),
        (["--cors-origin", ""], ["--cors-origin"]),
        (["--allowed-host", "a.example:80"], ["--allowed-host", "port"]),
        (["--allowed-host", ""], ["--allowed-host"]),
        (["--otlp-traces-endpoint", "localhost:4318"], ["--otlp-traces-endpoint", "'localhost:4318'"]),
        (["--otlp-traces-endpoint", "http:///v1/traces"], ["--otlp-traces-endpoint", "URL"]),
        (["--no-warmup", "--prefilling", "dream"], ["--prefilling", "--no-warmup"]),
        (["--host", "no.such.host.invalid"], ["cannot listen"]),
        (["no-such-directory"], ["no-such-directory"]),
    ],
)
def test_a_mistake_is_one_line(served: list[Served], options: list[str], words: list[str]):
    assert_mistake(serve(*options), *words)
    assert not served


def test_without_the_extra_it_says_so(served: list[Served], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvloop" else name)
    assert_mistake(serve(), "uvloop", "jdllm[serve]")


@pytest.mark.parametrize(
    "lost", ["opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"]
)
def test_without_the_extra_for_spans_it_says_so(
    served: list[Served], monkeypatch: pytest.MonkeyPatch, lost: str
):
    for name in [name for name in sys.modules if name.startswith(f"{lost}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, lost, None)
    result = serve("--otlp-traces-endpoint", "http://localhost:4318/v1/traces")
    assert_mistake(result, "--otlp-traces-endpoint needs opentelemetry.", "jdllm[otel]")
    assert not served


@pytest.mark.parametrize("further", [[], ["--kv-pool", KV_POOL]])
def test_a_model_that_does_not_fit_has_an_exit_code_of_its_own(served: list[Served], further: list[str]):
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--memory", "8MiB", *further])
    assert result.exit_code == 3
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert not served
