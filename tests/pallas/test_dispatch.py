"""How operators choose their forms, and what they say about it."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jdllm.errors import ConfigError
from jdllm.pallas import dispatch
from jdllm.pallas.attention import AttentionOutput, api, attention, nothing_seen
from jdllm.pallas.attention.limits import ATTENTION
from jdllm.pallas.device import CPU, Kernels, Target, preferring, target
from jdllm.pallas.dispatch import Choice, Form, Operator, choices
from jdllm.pallas.masked_logits import Level, RowSampling, masked_logits
from jdllm.pallas.masked_logits import mosaic_gpu as kernel


def never(reason: str):
    def check(*operands: Any) -> None:
        raise NotImplementedError(reason)

    return check


def total(*forms: Form[None]) -> Operator[None]:
    return Operator("sum", forms)


BEST, PLAIN = Form[None]("best", never("too narrow")), Form[None]("plain")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "noted", {})
    dispatch.log_once.cache_clear()


def test_the_first_that_can_run_is_taken_and_reasons_are_kept():
    operator = total(BEST, Form("good", never("too old")), PLAIN, Form("oracle"))
    assert operator.choose(CPU, None) == operator.default(CPU) == PLAIN
    assert choices() == [Choice("sum", "plain", (("best", "too narrow"), ("good", "too old")))]


def test_a_form_that_is_asked_for_runs_or_says_why_not():
    operator = total(BEST, PLAIN)
    assert operator.choose(CPU, "plain") == PLAIN
    with pytest.raises(NotImplementedError, match="too narrow"):
        operator.choose(CPU, "best")
    with pytest.raises(
        NotImplementedError, match="sum: no implementation 'other', expected one of best, plain"
    ):
        operator.choose(CPU, "other")
    with pytest.raises(NotImplementedError, match="sum: no form can run: too narrow"):
        total(BEST).choose(CPU, None)


@pytest.mark.parametrize(("kernels", "form"), [("auto", "best"), ("triton", "good"), ("xla", "plain")])
def test_kernels_are_turned_off_unless_one_is_asked_for(kernels: Kernels, form: str):
    device = Target(True, 9.0, kernels)
    forms = Form[None]("best", language="mosaic_gpu"), Form[None]("good", language="triton"), PLAIN
    operator = total(*forms)
    assert operator.choose(device, None).name == operator.default(device).name == form
    assert choices() == [Choice("sum", form, ())]
    for other in forms:
        assert operator.choose(device, other.name) == other


def few_rows_only(q: jax.Array, scale: float) -> None:
    if len(q) > 2:
        raise NotImplementedError(f"takes 2 rows, not {len(q)}")


def zeros(q: jax.Array, *others: jax.Array, scale: float) -> AttentionOutput:
    return nothing_seen(q)


class TestAFormFromOutside:
    """One row of an operator's table is all that it takes."""

    @pytest.fixture(autouse=True)
    def added(self, monkeypatch: pytest.MonkeyPatch):
        form = Form[int]("zeros", few_rows_only, implementation=f"{__name__}:zeros")
        monkeypatch.setattr(api, "ATTENTION", ATTENTION._replace(forms=(form, *ATTENTION.forms)))

    def attend(self, rows: int, implementation: Any = None) -> jax.Array:
        x, bound = jnp.ones((rows, 1, 64)), jnp.arange(rows)
        return attention(x, x, x, 0 * bound, bound + 1, scale=1.0, implementation=implementation).o

    def test_it_is_chosen(self):
        assert not self.attend(2).any()
        assert choices() == [Choice("attention", "zeros", ())]

    def test_it_is_passed_over(self):
        assert self.attend(3).all()
        (choice,) = choices()
        assert (choice.form, choice.passed_over[0]) == ("xla", ("zeros", "takes 2 rows, not 3"))

    def test_it_is_asked_for(self):
        assert not self.attend(2, "zeros").any()
        assert self.attend(2, "xla").all()
        with pytest.raises(NotImplementedError, match="takes 2 rows, not 3"):
            self.attend(3, "zeros")


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
        total(BEST, PLAIN).choose(CPU, None)
        total(Form("best", never("too wide")), PLAIN).choose(CPU, None)
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
