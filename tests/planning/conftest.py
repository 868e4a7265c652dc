"""Configurations of the published shapes, and no card."""

import functools
import json
from pathlib import Path

import pytest

from jdllm.planning.account import make_account
from tests.helpers import Golden
from tests.planning.plan_command import SHAPES

_make_account = functools.cache(make_account)


@pytest.fixture(scope="session")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory for each family, with a config.json of the published shape and nothing else."""
    directories = {}
    for family, sizes in SHAPES.items():
        values = json.loads((Golden(family).directory / "config.json").read_text())
        directories[family] = tmp_path_factory.mktemp(family)
        (directories[family] / "config.json").write_text(json.dumps({**values, **sizes}))
    return directories


@pytest.fixture
def llada(configs: dict[str, Path]) -> Path:
    return configs["llada"]


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch):
    """No card is visible; and as most plans are of one model and budget, their accounts are made once."""
    monkeypatch.setattr("jdllm.planning.offloading.make_account", _make_account)
    monkeypatch.setattr("jdllm.planning.card.visible_card", lambda: None)
