"""Which card is planned for, and whether there is a compiler for it."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.errors import ConfigError
from jdllm.planning import card
from jdllm.planning.aot import capability_of, has_compiler, memory_of
from jdllm.planning.descriptions import described_targets
from tests.planning.fake_drivers import FakeCard, FakeDrivers

GIB = 2**30


@pytest.mark.parametrize(
    ("target", "capability", "memory"),
    [
        ("rtx3090", (8, 6), 24124 << 20),
        ("rtx4090", (8, 9), 25250627584),
        ("rtx5090", (12, 0), 33660534784),
        ("a100-40gb", (8, 0), 42298834944),
        ("a100-80gb", (8, 0), 85100068864),
        ("l40s", (8, 9), 45467 << 20),
        ("h100", (9, 0), 84942979072),
        ("h200", (9, 0), 150109880320),
        ("b200", (10, 0), 191514411008),
    ],
)
def test_descriptions(target: str, capability: tuple[int, int], memory: int):
    assert (capability_of(target), memory_of(target)) == (capability, memory)
    assert card.described_card(target) == card.Card(target, target, memory)
    assert card.target_for(capability, memory) == target


@pytest.mark.parametrize(
    ("capability", "gib", "target"),
    [
        *[((8, 0), gib, "a100-40gb") for gib in (4.75, 24, 40)],
        *[((8, 0), gib, "a100-80gb") for gib in (64, 80, 96)],
        *[((8, 6), gib, "rtx3090") for gib in (8, 24, 48)],
        *[((8, 9), gib, "rtx4090") for gib in (12, 16, 24)],
        *[((8, 9), gib, "l40s") for gib in (45, 48)],
        *[((9, 0), gib, "h100") for gib in (80, 94, 96)],
        *[((9, 0), gib, "h200") for gib in (140, 141)],
        *[((12, 0), gib, "rtx5090") for gib in (16, 32, 96)],
        *[(capability, 80, "h200") for capability in ((7, 5), (8, 7), (10, 3), (12, 1))],
    ],
)
def test_the_description_of_a_card(capability: tuple[int, int], gib: float, target: str):
    assert card.target_for(capability, int(gib * GIB)) == target


@given(st.sampled_from(described_targets()), st.integers(1, 1 << 40))
def test_no_description_of_the_same_capability_is_nearer(target: str, memory: int):
    found = card.target_for(capability_of(target), memory)
    assert capability_of(found) == capability_of(target)
    assert abs(memory_of(found) - memory) <= abs(memory_of(target) - memory)


def test_a_name_without_a_description():
    with pytest.raises(ConfigError, match="unknown target 'h201': expected one of a100-40gb, a100-80gb, "):
        card.described_card("h201")


def test_the_card_that_cuda_shows_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(card, "platforms", lambda: None)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    ada, hopper = FakeCard("ada", (8, 9), 50, 3, 20), FakeCard("hopper", (9, 0), 1 << 37, 1 << 29, 7)
    FakeDrivers(monkeypatch, visible=[hopper], present=[ada, hopper])
    found = card.visible_card()
    assert found is not None
    assert found == card.Card("hopper", "h200", (1 << 37) - (1 << 29))
    assert found.default_memory == 0.75 * found.memory + (768 << 20)


def test_a_card_of_an_unknown_capability(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(card, "platforms", lambda: None)
    turing = FakeCard("turing", (7, 5), 16 * GIB, 0, 0)
    FakeDrivers(monkeypatch, visible=[turing], present=[turing])
    assert card.visible_card() == card.Card("turing", card.DEFAULT_TARGET, 16 * GIB, described=False)


def test_a_card_that_jax_may_not_use_is_not_asked(monkeypatch: pytest.MonkeyPatch):
    hopper = FakeCard("hopper", (9, 0), 1 << 37, 0, 0)
    FakeDrivers(monkeypatch, visible=[hopper], present=[hopper])
    monkeypatch.setattr(card, "platforms", lambda: "cpu")
    assert card.visible_card() is None


def test_no_driver_is_no_card(monkeypatch: pytest.MonkeyPatch):
    FakeDrivers(monkeypatch, visible=None, present=None)
    monkeypatch.setattr(card, "platforms", lambda: None)
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
