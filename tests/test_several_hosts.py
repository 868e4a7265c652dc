"""Processes of several hosts share a model: here two on one host, over the CPU's collectives."""

import json
import os
import socket
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from jdllm.checkpoints.conversion import to_native
from jdllm.cli import app
from tests.helpers import ROOT, Golden, slow
from tests.test_several_cards import on_cards

LLADA = Golden("llada")


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def start(devices: int, *commands: list[str]) -> list[subprocess.Popen[str]]:
    """Processes that run these commands, each with so many devices of the CPU."""
    env = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen([sys.executable, "-m", *one], env=env, cwd=ROOT, **pipes) for one in commands]


def end(started: list[subprocess.Popen[str]]) -> list[Ended]:
    """How processes end."""
    try:
        told = [process.communicate(timeout=400) for process in started]
    finally:
        for process in started:
            process.kill()
    return [Ended(process.returncode, *texts) for process, texts in zip(started, told, strict=True)]


def coordinator() -> str:
    with socket.create_server(("localhost", 0)) as server:
        return f"localhost:{server.getsockname()[1]}"


def told_by_two(devices: int, *what: str) -> list[list[dict[str, Any]]]:
    """What two processes of `tests.several_hosts` tell."""
    address = coordinator()
    ended = end(start(devices, *(["tests.several_hosts", address, "2", str(i), *what] for i in range(2))))
    assert [one.code for one in ended] == [0, 0], ended
    return [[json.loads(line) for line in one.out.splitlines() if line.startswith("{")] for one in ended]


@pytest.fixture(scope="module")
def agreed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    native = tmp_path_factory.mktemp("native") / "llada"
    to_native(LLADA.directory, native)
    return [told for (told,) in told_by_two(1, "agree", str(LLADA.directory), str(native))]


def test_processes_agree(agreed: list[dict[str, Any]]):
    assert [told["leads"] for told in agreed] == [True, False]
    for told in agreed:
        assert told["least"] == [0, 4, -(1 << 40) - 1]
        assert told["from_first"] == [1 << 52, 0]
        assert told["same"] is None
        assert "processes 0 and 1 have different texts" in told["different"]
        assert "different prompts or parameters" in told["other_prompts"]
        assert "different prompts or parameters" in told["other_parameters"]
    seeds, others = (told["seeds"] for told in agreed)
    assert seeds == others
    assert len(set(seeds)) == 2


def test_devices_that_processes_cannot_share_are_refused(agreed: list[dict[str, Any]]):
    for told in agreed:
        assert "expected a multiple of 2" in told["odd"]
        assert told["many"] == "devices is 4, and 2 processes have 2"


def test_each_process_reads_its_own_parts(agreed: list[dict[str, Any]]):
    """Norms are on both; of everything else each has half. Headers take a few kilobytes."""
    stored = LLADA.tensors("model")
    sizes = {name: x.nbytes for name, x in stored.items()}
    norms = sum(size for name, size in sizes.items() if len(stored[name].shape) == 1)
    own = (sum(sizes.values()) - norms) // 2 + norms
    for told in agreed:
        assert all(own <= read < 1.05 * own for read in told["read"]), (own, told["read"])
        whole = [stored["model.transformer.wte.weight"].size // 2]
        for name, share in (("q_proj", 2), ("attn_out", 2), ("ff_out", 2), ("ff_norm", 1)):
            layers = [
                x.size for key, x in stored.items() if key.endswith(f".{name}.weight") and "blocks" in key
            ]
            whole.append(sum(layers) // share)
        assert told["shards"] == [[[size, True] for size in whole]] * 2


@pytest.mark.parametrize(
    ("family", "cases", "devices"),
    [
        slow("llada", "uncached,dual,drawn", 1),
        slow("llada", "uncached,sparse", 2),
        slow("llada", "long", 1),
        slow("llama", "all", 1),
        slow("sdar", "schedule,dynamic,chosen", 1),
    ],
)
def test_tokens_are_those_of_one_process_with_one_card(family: str, cases: str, devices: int):
    (alone,) = on_cards(family, cases, 1)
    for (found,) in told_by_two(devices, "generate", family, cases, str(2 * devices)):
        assert found["tokens"] == alone["tokens"]
        assert all(tokens for tokens in found["tokens"].values())
        # Cards that deal out long steps have all layers beside their parts.
        assert (found["weights"] < alone["weights"]) is (cases != "long")


def by_two(options: list[str], *own: list[str]) -> list[subprocess.Popen[str]]:
    """`jdllm generate` of two processes, with a device each; `own` are arguments of each."""
    address = coordinator()
    together = [["--coordinator", address, "--processes", "2", "--process", str(i)] for i in range(2)]
    options = ["--devices", "2", "--dtype", "float32", *options]
    return start(1, *(["jdllm", "generate", *options, *a, *b] for a, b in zip(together, own, strict=True)))


def own_lines(text: str) -> list[str]:
    """Without what the CPU's collectives print."""
    return [line for line in text.splitlines() if "[Gloo]" not in line]


def errors(ended: Ended) -> list[str]:
    return [line for line in ended.err.splitlines() if line.startswith("error: ")]


def test_processes_that_are_asked_different_things_refuse():
    ended = end(by_two([], ["1+1="], ["1+2="]))
    assert [one.code for one in ended] == [2, 2]
    for one in ended:
        (line,) = errors(one)
        assert "processes 0 and 1 have different prompts or parameters" in line


@pytest.mark.slow
def test_only_the_first_process_prints():
    ended = end(by_two(["--json", "--seed", "-1", "7+8="], [], []))
    assert [one.code for one in ended] == [0, 0], ended
    first, second = (own_lines(one.out) for one in ended)
    assert [output["text"] for output in json.loads(first[0])["outputs"]] == ["15"]
    assert (len(first), second) == (1, [])
    assert not own_lines(ended[1].err)


@pytest.mark.slow
def test_a_process_whose_fellow_has_died_ends():
    started = by_two(["--json", "7+8="], [], [])
    for process in started:  # they tell so when they have found each other
        assert process.stdout is not None
        assert "[Gloo]" in process.stdout.readline()
    started[1].kill()
    first, _ = end(started)
    assert (first.code, own_lines(first.out)) == (2, [])
    (line,) = errors(first)
    assert "process 0 of 2 cannot go on" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--process", "1"], "coordinator and processes missing"),
        (["--coordinator", "host"], "processes and process missing"),
        (["--coordinator", "host", "--processes", "2", "--process", "0"], "expected HOST:PORT"),
        (["--coordinator", "auto", "--processes", "2"], "from the environment"),
    ],
)
def test_options_that_name_no_place_are_refused(options: list[str], words: str):
    result = CliRunner().invoke(app, ["generate", *options, "1+1="])
    assert result.exit_code == 2
    assert words in result.stderr
