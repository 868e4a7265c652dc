"""The rules of a batch at work: each segment by its own."""

from collections.abc import Mapping
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jdllm.arrays import Tensor
from jdllm.decoding.transfer.of_rules import OfRules
from jdllm.decoding.transfer.ranking import (
    Accept,
    AcceptWithState,
    Candidates,
    Ranked,
    RuleParams,
    State,
    rank_candidates,
)
from jdllm.decoding.transfer.rule import Acceptance

States = Mapping[str, State]
"""The state of each rule that has one, by the rule's name; arrays of rows in the order of the candidates."""


def select(
    candidates: Candidates,
    rule: Int[Tensor, " segments"],
    params: RuleParams,
    states: States,
    *,
    long_rules: bool = True,
) -> tuple[Bool[Array, " rows"], States]:
    """The rows that commit, each segment by its own rule.

    Arguments:
    - `candidates`: the evaluated rows.
    - `rule`: the number of each segment's rule.
    - `params`: the rules' parameters per segment; `params.options` is an `OfRules`.
    - `states`: before the step.
    - `long_rules`: whether a segment may have a rule that takes long; static.

    Returns the rows that commit, in the order of `candidates` (only masked rows do), and the states after the
    step.
    """
    rule = jnp.asarray(rule)
    segments = rule.shape[0]
    ranked = rank_candidates(candidates, segments)
    own_rule = rule[ranked.segment]
    own_params = jax.tree.map(lambda x: jnp.asarray(x)[ranked.segment], params)
    commit = nothing = jnp.zeros(ranked.rank.shape, bool)
    after = dict(states)
    for number, acceptance in cast(OfRules, params.options).numbered:
        if acceptance.takes_long and not long_rules:
            continue
        before = _ranked_state(acceptance, states.get(acceptance.name, {}), ranked)

        def run(
            acceptance: Acceptance = acceptance, before: State = before
        ) -> tuple[Bool[Array, " rows"], State]:
            if acceptance.state:
                return cast(AcceptWithState, acceptance.accept)(ranked, own_params, segments, before)
            return cast(Accept, acceptance.accept)(ranked, own_params, segments), {}

        # A device waits for the host at every condition: not for a few comparisons.
        if acceptance.takes_long:
            is_asked = jnp.any(rule == number)
            accepted, state = lax.cond(is_asked, run, lambda before=before: (nothing, before))
        else:
            accepted, state = run()
        commit = jnp.where(own_rule == number, accepted, commit)
        if acceptance.state:
            after[acceptance.name] = {
                array.name: _merged(state[array.name], before[array.name], own_rule == number, ranked.row)
                if array.per_row
                else jnp.where(rule == number, state[array.name], before[array.name])
                for array in acceptance.state
            }
    commit &= ranked.segment < segments
    return jnp.zeros_like(commit).at[ranked.row].set(commit), after


def _ranked_state(acceptance: Acceptance, state: State, ranked: Ranked) -> State:
    """A rule's state with arrays of rows in the order of the ranks."""
    return {
        array.name: state[array.name][ranked.row] if array.per_row else state[array.name]
        for array in acceptance.state
    }


def _merged(new: Array, old: Array, own: Bool[Array, " rows"], row: Int[Array, " rows"]) -> Array:
    """An array of rows after the step, in the order of the candidates."""
    return jnp.zeros_like(old).at[row].set(jnp.where(own, new, old))
