"""Loads on a server in a process of its own."""

from pathlib import Path

import httpx
import pytest

from benchmarks.serving import served
from jdllm.demo import checkpoint_path

pytestmark = pytest.mark.demo


def test_a_server_answers_inside_and_has_ended_outside(tmp_path: Path):
    with served(checkpoint_path(), 512, tmp_path) as server:
        assert server["rows"] == 512
        assert server["start_s"] > 0
        assert httpx.get(f"{server['url']}/health").status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server['url']}/health")
