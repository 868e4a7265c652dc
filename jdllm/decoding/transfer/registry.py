"""The transfer rules: one row each."""

import enum
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jdllm.arrays import Tensor
from jdllm.decoding.transfer import deferred, entropy_bound, factor, origin, quota, threshold
from jdllm.decoding.transfer.ranking import Candidates, Ranked, RuleParams, rank_candidates


class Rule(enum.IntEnum):
    """Code of each rule in the segments' parameters."""

    QUOTA = 0
    THRESHOLD = 1
    FACTOR = 2
    ENTROPY_BOUND = 3
    ORIGIN = 4
    DEFERRED = 5


Accept = Callable[[Ranked, RuleParams, int], Bool[Array, " rows"]]

RULES: dict[Rule, Accept] = {
    Rule.QUOTA: quota.accept,
    Rule.THRESHOLD: threshold.accept,
    Rule.FACTOR: factor.accept,
    Rule.ENTROPY_BOUND: entropy_bound.accept,
    Rule.ORIGIN: origin.accept,
    Rule.DEFERRED: deferred.accept,
}


def select(
    candidates: Candidates,
    rule: Int[Tensor, " segments"],
    params: RuleParams,
    *,
    entropies: bool = True,
) -> Bool[Array, " rows"]:
    """The rows that commit, each segment by its own rule.

    Arguments:
    - `candidates`: the evaluated rows.
    - `rule`: a `Rule` per segment.
    - `params`: the rules' parameters per segment.
    - `entropies`: whether confidences may be entropies; static. Without them no segment has the rule that
      needs them, whose sums are a loop over all rows.

    Returns the rows that commit, in the order of `candidates`; only masked rows do.
    """
    rule = jnp.asarray(rule)
    segments = rule.shape[0]
    ranked = rank_candidates(candidates, segments)
    own_rule = rule[ranked.segment]
    own_params = jax.tree.map(lambda x: jnp.asarray(x)[ranked.segment], params)
    commit = nothing = jnp.zeros(ranked.rank.shape, bool)
    for code, accept in RULES.items():
        if code is Rule.ENTROPY_BOUND and not entropies:
            continue
        run = functools.partial(accept, ranked, own_params, segments)
        # A device waits for the host at every condition: not for a few comparisons.
        if code is Rule.ENTROPY_BOUND:
            accepted = lax.cond(jnp.any(rule == code), run, lambda: nothing)
        else:
            accepted = run()
        commit = jnp.where(own_rule == code, accepted, commit)
    commit &= ranked.segment < segments
    return jnp.zeros_like(commit).at[ranked.row].set(commit)
