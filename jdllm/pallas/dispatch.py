"""The one rule by which operators choose among their forms.

An operator is a table of forms in order of preference, each with a check of what it can take. The check is
asked before the form is called. So what a form itself raises, such as a gap in the lowering of a kernel, is
never taken for a reason to run a slower one.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jdllm.pallas.device import Kernels, Target

Language = Literal["mosaic_gpu", "triton", "xla"]
"""What a form is written in: Pallas for Hopper, Triton for cards from Ampere on, or JAX for any device."""

_CHECKS: Mapping[Language, Callable[[Target, str], None]] = {
    "mosaic_gpu": Target.check_hopper,
    "triton": Target.check_triton,
    "xla": lambda device, what: None,
}

_TURNED_OFF: Mapping[Kernels, tuple[Language, ...]] = {
    "auto": (),
    "triton": ("mosaic_gpu",),
    "xla": ("mosaic_gpu", "triton"),
}

Reasons = tuple[tuple[str, str], ...]
_log = logging.getLogger("jdllm")
_MOST_KEPT = 1024


def always(*operands: Any) -> None:
    """The check of a form that takes all operands."""


class Form[W](NamedTuple):
    """One of the ways to compute an operator.

    - `name`: by which callers ask for it.
    - `check`: raises `NotImplementedError`, naming the limit, for operands that the form cannot take.
    - `language`: decides the devices that it runs on, and the preferences that turn it off.
    - `hints`: options of the operator that change no result, those that this form makes use of.
    - `workspace`: what plans ask about a call's memory besides operands and results; the table says what.
    - `implementation`: its function, "module:name". Pallas for GPUs and Triton take a while to import: the
      module is imported where the form runs.
    """

    name: str
    check: Callable[..., None] = always
    language: Language = "xla"
    hints: tuple[str, ...] = ()
    workspace: W | None = None
    implementation: str = ""

    def __call__(self, *operands: Any, hints: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """Run it. Of the hints it is given those that it makes use of."""
        module, function = self.implementation.split(":")
        run = getattr(importlib.import_module(module), function)
        return run(*operands, **options, **{name: (hints or {})[name] for name in self.hints})


def forms_of[W](package: str, *forms: Form[W]) -> tuple[Form[W], ...]:
    """Forms in modules of a package by their names, as functions by the names of package and form."""
    what = package.rpartition(".")[2]
    return tuple(form._replace(implementation=f"{package}.{form.name}:{what}_{form.name}") for form in forms)


class Choice(NamedTuple):
    """The form of an operator that runs, and why those before it in the order of preference do not.

    - `operator`, `form`: names.
    - `passed_over`: names and reasons.
    """

    operator: str
    form: str
    passed_over: Reasons


noted: dict[Choice, None] = {}
"""The different choices so far, the oldest first."""


class Operator[W](NamedTuple):
    """An operator with several forms.

    - `name`: for messages.
    - `forms`: the preferred first.
    """

    name: str
    forms: tuple[Form[W], ...]

    def choose(self, device: Target, implementation: str | None, *operands: Any) -> Form[W]:
        """Choose a form.

        Arguments:
        - `device`: what will run it.
        - `implementation`: the form that the caller wants; `None` for the first that can run.
        - `operands`: what the checks of forms take.

        Raises `NotImplementedError` where the wanted form is unknown or cannot run, naming its limit, and
        where none can run. A form that was passed over is logged, each reason once.
        """
        if implementation is None:
            form, passed_over = self._first(device, operands)
            _keep(Choice(self.name, form.name, passed_over))
            return form
        for form in self.forms:
            if form.name == implementation:
                self._check(form, device, operands)
                return form
        names = ", ".join(form.name for form in self.forms)
        raise NotImplementedError(
            f"{self.name}: no implementation {implementation!r}, expected one of {names}"
        )

    def default(self, device: Target, *operands: Any) -> Form[W]:
        """The form that `choose` takes where the caller wants none."""
        return self._first(device, operands)[0]

    def limits(self, device: Target, *operands: Any) -> Iterator[str]:
        """Why forms cannot run, of those that cannot."""
        return filter(None, (limit(self._check, form, device, operands) for form in self.forms))

    def _first(self, device: Target, operands: tuple[Any, ...]) -> tuple[Form[W], Reasons]:
        """The first form that can run, and why those before it do not."""
        passed_over: list[tuple[str, str]] = []
        for form in self.forms:
            if form.language in _TURNED_OFF[device.kernels]:
                continue
            reason = limit(self._check, form, device, operands)
            if reason is None:
                return form, tuple(passed_over)
            passed_over.append((form.name, reason))
        reasons = "; ".join(why for _, why in passed_over)
        raise NotImplementedError(f"{self.name}: no form can run: {reasons}")

    def _check(self, form: Form[W], device: Target, operands: tuple[Any, ...]) -> None:
        _CHECKS[form.language](device, self.name)
        form.check(*operands)


def check_one_dtype(refusal: str, known: Sequence[Any], *operands: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Raise `NotImplementedError`, the refusal and the types, unless all operands are of one known type."""
    dtypes = {x.dtype for x in operands}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(x) for x in known}:
        raise NotImplementedError(f"{refusal} {', '.join(sorted(map(str, dtypes)))}")


def limit[**P](check: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> str | None:
    """Why a form cannot run, as its check says; `None` where it can."""
    try:
        check(*args, **kwargs)
    except NotImplementedError as e:
        return str(e)
    return None


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
