"""A short request beside long ones, on a server."""

import json
from pathlib import Path

import pytest

from benchmarks.short_request import main

pytestmark = pytest.mark.slow


def test_each_cache_has_a_row_with_its_bound(tmp_path: Path):
    main(["--long", "2", "--tokens", "200", "--repeats", "2", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "short_request_demo.json").read_text())["rows"]
    assert [row["cache"] for row in rows] == ["none", "dual"]
    for row in rows:
        assert row["alone_s"] > 0
        assert row["worst_s"] >= row["beside_s"] > 0
        assert row["bound_s"] == 3 * row["alone_s"] + row["step_of_long_s"]
