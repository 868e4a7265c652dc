"""The transfer rules and cache policies that requests can ask for, and the parameters that these declare."""

import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jdllm.decoding.caches import dual, head_sparse, prefix, prompt, selective, sparse
from jdllm.decoding.caches.policy import CachePolicy
from jdllm.decoding.option import Option
from jdllm.decoding.transfer import (
    adaptive,
    deferred,
    dynamic,
    entropy_bound,
    factor,
    falling_threshold,
    lossy_speculation,
    quota,
    threshold,
    timetable,
)
from jdllm.decoding.transfer.rule import Acceptance, TransferRule
from jdllm.errors import ConfigError

RULES: dict[tuple[str, str], TransferRule] = {}
"""The rules by parameter and value, as `("transfer", "threshold")`."""

POLICIES: dict[str, CachePolicy] = {}
"""The cache policies by name; `"none"` is the absence of one."""

NO_CACHE = "none"

_NUMBERS: dict[Acceptance, int] = {}
"""The number of each acceptance in batches; no number is given twice."""

_next_number = itertools.count()


class Declared(NamedTuple):
    """An option, and the values of other parameters that use it, any of them."""

    option: Option
    users: Mapping[str, tuple[str, ...]]


def register(declared: TransferRule | CachePolicy) -> None:
    """Let requests ask for a rule or a policy, and for its options.

    `SamplingParams`, the command line and the server know it from then on. Register before a model is loaded
    or a server made: executables that were compiled before serve no longer.

    Raises `ConfigError` for a name that is taken, of a rule, a policy, an acceptance or another option.
    """
    if isinstance(declared, CachePolicy):
        if declared.name in (NO_CACHE, *POLICIES):
            raise ConfigError(f"cache {declared.name!r} is registered already: name the policy otherwise")
        _check_options(declared.options)
        POLICIES[declared.name] = declared
    else:
        if (declared.field, declared.name) in RULES:
            raise ConfigError(
                f"{declared.field} {declared.name!r} is registered already: name the rule otherwise"
            )
        acceptances = _acceptances(declared)
        for one in acceptances:
            if one not in _NUMBERS and any(other.name == one.name for other in _NUMBERS):
                raise ConfigError(f"an acceptance {one.name!r} is registered already: name it otherwise")
        _check_options(declared.options)
        RULES[declared.field, declared.name] = declared
        for one in acceptances:
            if one not in _NUMBERS:
                _NUMBERS[one] = next(_next_number)
    options.cache_clear()


def unregister(declared: TransferRule | CachePolicy) -> None:
    """Take back a registration; no request of it may be running."""
    if isinstance(declared, CachePolicy):
        del POLICIES[declared.name]
    else:
        del RULES[declared.field, declared.name]
        left = {one for rule in RULES.values() for one in _acceptances(rule)}
        for one in _NUMBERS.keys() - left:
            del _NUMBERS[one]
    options.cache_clear()


def rule_names(field: str) -> list[str]:
    """The rules of `transfer` or `alg`, in the order in which they were registered."""
    return [name for of, name in RULES if of == field]


def cache_names() -> list[str]:
    """The values of `cache`."""
    return [NO_CACHE, *POLICIES]


def number_of(acceptance: Acceptance) -> int:
    """The number of an acceptance in batches."""
    return _NUMBERS[acceptance]


def numbered() -> tuple[tuple[int, Acceptance], ...]:
    """All acceptances with their numbers, lowest first."""
    return tuple((number, one) for one, number in _NUMBERS.items())


@functools.cache
def options() -> Mapping[str, Declared]:
    """The options of all rules and policies by name, in the order in which they were registered."""
    users = [(rule.field, rule.name, rule.options) for rule in RULES.values()]
    users += [("cache", policy.name, policy.options) for policy in POLICIES.values()]
    found: dict[str, tuple[Option, dict[str, tuple[str, ...]]]] = {}
    for field, name, own in users:
        for option in own:
            _, by_field = found.setdefault(option.name, (option, {}))
            by_field[field] = (*by_field.get(field, ()), name)
    return {name: Declared(*entry) for name, entry in found.items()}


def _acceptances(rule: TransferRule) -> list[Acceptance]:
    """The acceptances of a rule, with and without a cache."""
    found = [one.acceptance for one in (rule, rule.cached) if one is not None]
    return [one for one in found if one is not None]


def _check_options(own: Iterable[Option]) -> None:
    for option in own:
        known = options().get(option.name)
        if known is not None and known.option != option:
            raise ConfigError(f"an option {option.name!r} is registered already: name it otherwise")


def _register_own() -> None:
    for rule in (
        quota.SCHEDULE,
        threshold.RULE,
        falling_threshold.RULE,
        factor.RULE,
        entropy_bound.RULE,
        quota.MARGIN,
        dynamic.RULE,
        quota.SEQUENTIAL,
        adaptive.RULE,
        lossy_speculation.RULE,
        *timetable.RULES,
        deferred.RULE,
    ):
        register(rule)
    for cache in (prefix, dual, selective, sparse, head_sparse, prompt):
        register(cache.POLICY)


_register_own()
