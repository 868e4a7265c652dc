"""Which card is planned for, and whether there is a compiler for it."""

import sys
from pathlib import Path

import pytest

from jdllm.errors import ConfigError
from jdllm.planning import card
from jdllm.planning.aot import capability_of, has_compiler, memory_of
from tests.planning.fake_drivers import FakeCard, FakeDrivers


@pytest.mark.parametrize(
    ("target", "capability", "memory"),
    [("h200", (9, 0), 150109880320), ("a100", (8, 0), 85100068864), ("l40s", (8, 9), 47000000000)],
)
def test_descriptions(target: str, capability: tuple[int, int], memory: int):
    assert (capability_of(target), memory_of(target)) == (capability, memory)
    assert card.described_card(target) == card.Card(target, target, memory)
    assert card.target_for(capability) == target


def test_cards_without_a_description():
    assert card.target_for((10, 0)) == "h200"
    with pytest.raises(ConfigError, match="unknown target 'b200'"):
        card.described_card("b200")


def test_the_card_that_cuda_shows_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(card, "_platforms", lambda: None)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    ada, hopper = FakeCard("ada", (8, 9), 50, 3, 20), FakeCard("hopper", (9, 0), 1 << 37, 1 << 29, 7)
    FakeDrivers(monkeypatch, visible=[hopper], present=[ada, hopper])
    found = card.visible_card()
    assert found is not None
    assert found == card.Card("hopper", "h200", (1 << 37) - (1 << 29))
    assert found.default_memory == 0.75 * found.memory + (768 << 20)


def test_a_card_that_jax_may_not_use_is_not_asked(monkeypatch: pytest.MonkeyPatch):
    hopper = FakeCard("hopper", (9, 0), 1 << 37, 0, 0)
    FakeDrivers(monkeypatch, visible=[hopper], present=[hopper])
    monkeypatch.setattr(card, "_platforms", lambda: "cpu")
    assert card.visible_card() is None


def test_no_driver_is_no_card(monkeypatch: pytest.MonkeyPatch):
    FakeDrivers(monkeypatch, visible=None, present=None)
    monkeypatch.setattr(card, "_platforms", lambda: None)
    assert card.visible_card() is None


@pytest.mark.parametrize(("plugin", "compiles"), [("xla_cuda12", True), ("xla_cuda13", True), ("tpu", False)])
def test_either_cuda_plugin_compiles(
    plugin: str, compiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "jax_plugins" / plugin).mkdir(parents=True)
    (tmp_path / "jax_plugins" / plugin / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.startswith("jax_plugins")]:
        monkeypatch.delitem(sys.modules, name)
    assert has_compiler() == compiles


def test_without_plugins_nothing_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.startswith("jax_plugins")]:
        monkeypatch.delitem(sys.modules, name)
    assert not has_compiler()
