"""A load run of aiperf's command line, which has an environment of its own: see the Makefile."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jdllm.demo import checkpoint_path
from tests.clients.servers import MODEL, Server

pytestmark = pytest.mark.clients

REQUESTS, CONCURRENCY = 24, 6
READ, MADE = 16, 8
"""Tokens of each prompt and of each answer."""


def load(server: Server, directory: Path, *options: str) -> dict[str, Any]:
    """What a run reports."""
    command = [os.environ["AIPERF"], "profile", "--model", MODEL, "--url", server.url]
    command += ["--api-key", server.api_key or "", "--tokenizer", str(checkpoint_path())]
    command += ["--request-count", str(REQUESTS), "--concurrency", str(CONCURRENCY)]
    command += ["--isl", str(READ), "--osl", str(MADE), "--extra-inputs", "ignore_eos:true"]
    command += ["--random-seed", "1"]  # some prompts are answered by special tokens alone: aiperf drops these
    command += ["--use-server-token-count", "--no-gpu-telemetry", "--ui", "none"]
    command += ["--output-artifact-dir", str(directory), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((directory / "profile_export_aiperf.json").read_text())


def test_a_load_run(server: Server, tmp_path: Path):
    report = load(server, tmp_path, "--endpoint-type", "chat", "--streaming")
    assert report["request_count"]["avg"] == REQUESTS
    assert report["output_sequence_length"]["avg"] == MADE
    assert report["request_latency"]["p99"] >= report["time_to_first_token"]["avg"] > 0
    server.settle()
