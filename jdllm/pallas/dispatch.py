"""The one rule by which operators choose among their forms.

An operator lists its forms in order of preference, each with a check of what it can take. The check is asked
before the form is called. So what a form itself raises, such as a gap in the lowering of a kernel, is never
taken for a reason to run a slower one.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jdllm.pallas.device import Kernels, Target

Check = Callable[[], None]
"""Raises `NotImplementedError`, naming the limit, where a form cannot run."""

Forms = Mapping[str, Check]
"""Forms of an operator by name, the preferred first."""

_TURNED_OFF: Mapping[Kernels, frozenset[str]] = {
    "auto": frozenset(),
    "triton": frozenset({"mosaic_gpu"}),
    "xla": frozenset({"mosaic_gpu", "triton"}),
}

_log = logging.getLogger("jdllm")
_MOST_KEPT = 1024


class Choice(NamedTuple):
    """The form of an operator that runs, and why those before it in the order of preference do not.

    - `operator`, `form`: names.
    - `passed_over`: names and reasons.
    """

    operator: str
    form: str
    passed_over: tuple[tuple[str, str], ...]


noted: dict[Choice, None] = {}
"""The different choices so far, the oldest first."""


def choose(operator: str, forms: Forms, implementation: str | None, kernels: Kernels = "auto") -> str:
    """Choose a form.

    Arguments:
    - `operator`: its name, for messages.
    - `implementation`: the form that the caller wants; `None` for the first that can run.
    - `kernels`: those that may run where the caller wants none.

    Returns its name. Raises `NotImplementedError` where the wanted form is unknown or cannot run, naming its
    limit, and where none can run. A form that was passed over is logged, each reason once.
    """
    if implementation is not None:
        if implementation not in forms:
            raise NotImplementedError(
                f"{operator}: no implementation {implementation!r}, expected one of {', '.join(forms)}"
            )
        forms[implementation]()
        return implementation
    form, passed_over = _first(forms, kernels)
    if form is None:
        raise NotImplementedError(f"{operator}: no form can run: " + "; ".join(why for _, why in passed_over))
    _keep(Choice(operator, form, passed_over))
    return form


def default_form(forms: Forms, kernels: Kernels) -> str | None:
    """The form that `choose` takes by default, `None` where none can run."""
    return _first(forms, kernels)[0]


def _first(forms: Forms, kernels: Kernels) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """The first form that can run, and why those before it do not."""
    passed_over = []
    for form, check in forms.items():
        if form in _TURNED_OFF[kernels]:
            continue
        reason = limit(check)
        if reason is None:
            return form, tuple(passed_over)
        passed_over.append((form, reason))
    return None, tuple(passed_over)


def limit(check: Check) -> str | None:
    """Why a form cannot run; `None` where it can."""
    try:
        check()
    except NotImplementedError as e:
        return str(e)
    return None


def always() -> None:
    """The check of a form that runs everywhere."""


def card_forms(device: Target, operator: str, mosaic_gpu: Check, triton: Check, *portable: str) -> Forms:
    """The forms of an operator that has kernels for NVIDIA cards.

    Arguments:
    - `operator`: its name, for messages.
    - `mosaic_gpu`, `triton`: check the operands of the kernels; those of the device come first.
    - `portable`: names of forms that run everywhere.
    """

    def on_hopper() -> None:
        device.check_hopper(operator)
        mosaic_gpu()

    def in_triton() -> None:
        device.check_triton(operator)
        triton()

    return {"mosaic_gpu": on_hopper, "triton": in_triton, **dict.fromkeys(portable, always)}


def choices() -> list[Choice]:
    """The different choices of this process so far, the oldest first."""
    return list(noted)


def _keep(choice: Choice) -> None:
    if choice in noted or len(noted) == _MOST_KEPT:
        return
    noted[choice] = None
    for form, reason in choice.passed_over:
        log_once(f"{choice.operator} runs as {choice.form}, not as {form}: {reason}")


@functools.cache
def log_once(message: str) -> None:
    _log.info(message)
