"""Which card the drivers are asked for: that of CUDA's number, which is not NVML's."""

import pytest

from jdllm.planning.driver import CardState, card_state
from tests.planning.fake_drivers import FakeCard, FakeDrivers

GIB = 2**30
SMALL = FakeCard("small", (8, 9), 48 * GIB, GIB, 2 * GIB)
LARGE = FakeCard("large", (9, 0), 140 * GIB, GIB, 5 * GIB)
PART = FakeCard("a part of large", (0, 0), 20 * GIB, 0, GIB, whole=LARGE)


def test_the_order_is_that_of_cuda(monkeypatch: pytest.MonkeyPatch):
    drivers = FakeDrivers(monkeypatch, visible=[LARGE, SMALL], present=[SMALL, LARGE])
    assert card_state(0) == CardState("large", (9, 0), 139 * GIB, 5 * GIB)
    assert card_state(1) == CardState("small", (8, 9), 47 * GIB, 2 * GIB)
    assert drivers.sessions == 0


def test_a_part_of_a_card_has_its_own_memory(monkeypatch: pytest.MonkeyPatch):
    FakeDrivers(monkeypatch, visible=[PART], present=[SMALL, LARGE, PART])
    assert card_state(0) == CardState("a part of large", (9, 0), 20 * GIB, GIB)


@pytest.mark.parametrize(
    ("visible", "present"), [(None, [LARGE]), ([], [LARGE]), ([LARGE], None), ([LARGE], [SMALL])]
)
def test_a_driver_that_is_silent(
    monkeypatch: pytest.MonkeyPatch, visible: list[FakeCard] | None, present: list[FakeCard] | None
):
    drivers = FakeDrivers(monkeypatch, visible, present)
    assert card_state(0) is None
    assert drivers.sessions == 0
