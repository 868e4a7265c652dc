"""How operators choose their forms, and what they say about it."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jdllm.errors import ConfigError
from jdllm.pallas import dispatch
from jdllm.pallas.device import Kernels, Target, preferring, target
from jdllm.pallas.dispatch import Choice, always, choices, choose, default_form
from jdllm.pallas.masked_logits import Level, RowSampling, masked_logits
from jdllm.pallas.masked_logits import mosaic_gpu as kernel


def never(reason: str):
    def check() -> None:
        raise NotImplementedError(reason)

    return check


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "noted", {})
    dispatch.log_once.cache_clear()


def test_the_first_that_can_run_is_taken_and_reasons_are_kept():
    forms = {"best": never("too narrow"), "good": never("too old"), "plain": always, "oracle": always}
    assert choose("sum", forms, None) == "plain"
    assert choices() == [Choice("sum", "plain", (("best", "too narrow"), ("good", "too old")))]


def test_a_form_that_is_asked_for_runs_or_says_why_not():
    forms = {"best": never("too narrow"), "plain": always}
    assert choose("sum", forms, "plain") == "plain"
    with pytest.raises(NotImplementedError, match="too narrow"):
        choose("sum", forms, "best")
    with pytest.raises(
        NotImplementedError, match="sum: no implementation 'other', expected one of best, plain"
    ):
        choose("sum", forms, "other")
    with pytest.raises(NotImplementedError, match="sum: no form can run: too narrow"):
        choose("sum", {"best": never("too narrow")}, None)


@pytest.mark.parametrize(("kernels", "form"), [("auto", "mosaic_gpu"), ("triton", "triton"), ("xla", "xla")])
def test_kernels_are_turned_off_unless_one_is_asked_for(kernels: Kernels, form: str):
    forms = {"mosaic_gpu": always, "triton": always, "xla": always, "reference": always}
    assert choose("sum", forms, None, kernels) == default_form(forms, kernels) == form
    assert choices() == [Choice("sum", form, ())]
    for other in forms:
        assert choose("sum", forms, other, kernels) == other


def test_a_preference_holds_in_its_context_and_keeps_traces_apart():
    traced = []

    @jax.jit
    def function(x: jax.Array) -> jax.Array:
        traced.append(target().kernels)
        return x

    function(jnp.zeros(1))
    with preferring("triton"):
        function(jnp.zeros(1))
        function(jnp.zeros(1))
    function(jnp.zeros(1))
    assert traced == ["auto", "triton"]
    with pytest.raises(ConfigError, match="kernels are one of auto, triton, xla, not 'cuda'"):
        preferring("cuda")


def test_cards_before_ampere_are_refused():
    for device in (Target(False, None), Target(True, None), Target(True, 8.0), Target(True, 12.0)):
        device.check_card()
    with pytest.raises(ConfigError, match=r"compute capability 7\.5: jdllm runs on NVIDIA cards from Ampere"):
        Target(True, 7.5).check_card()


def test_each_fallback_is_logged_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "jdllm")
    for _ in range(3):
        choose("sum", {"best": never("too narrow"), "plain": always}, None)
        choose("sum", {"best": never("too wide"), "plain": always}, None)
    assert caplog.messages == [
        "sum runs as plain, not as best: too narrow",
        "sum runs as plain, not as best: too wide",
    ]


def test_a_gap_in_the_lowering_of_a_kernel_is_no_reason_to_run_another(monkeypatch: pytest.MonkeyPatch):
    def gap(*args: Any, **options: Any) -> Any:
        raise NotImplementedError("a gap in the lowering")

    monkeypatch.setattr("jdllm.pallas.masked_logits.api.target", lambda: Target(True, 9.0))
    monkeypatch.setattr(kernel, "masked_logits_mosaic_gpu", gap)
    rows, ids = jnp.zeros(2, jnp.int32), jnp.full((2, 2), -1)
    zeros, keys = jnp.zeros(2), (jnp.zeros(2, jnp.uint32), jnp.zeros(2, jnp.uint32))
    asked = RowSampling(
        keys, rows, zeros, rows > 0, rows + 512, zeros + 2, zeros, rows < 0, rows + 512, ids, ids, rows > 0
    )
    hidden, head = jnp.zeros((2, 512), jnp.bfloat16), jnp.zeros((512, 512), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="a gap in the lowering"):
        masked_logits(hidden, head, asked, Level.TOP)
