"""Self-speculation of block models as published (S2D2): which drafts are verified, and how."""

from typing import Literal

from jdllm.decoding.kinds import Length, Real, Scale
from jdllm.decoding.option import Option
from jdllm.decoding.transfer import dynamic, threshold
from jdllm.decoding.transfer.quota import linear
from jdllm.decoding.transfer.rule import Measure, TransferRule

(_THRESHOLD, _) = threshold.OPTIONS

RULE = TransferRule(
    "transfer",
    "lossy_speculation",
    "for block models: what the model accepts of its own draft as an autoregressive one, by drawn numbers, so"
    ' that tokens depend on `seed` and are not those of block length 1; or else as "dynamic" (S2D2)',
    dynamic.RULE.acceptance,
    Measure.ENTROPY,
    options=(
        _THRESHOLD,
        Option(
            "verify_policy",
            Literal["score", "hysteresis", "span"],
            "score",
            "what decides whether a draft is verified: the score that its first run of masks has, the score"
            " with one bound to begin and another to go on, or the length of the run.",
        ),
        Option(
            "verify_score",
            Real,
            0.0,
            'with the policy "score": a draft is verified whose score reaches this.',
            offered=False,
        ),
        Option(
            "verify_on",
            Real,
            1.0,
            'with the policy "hysteresis": verification begins where the score exceeds this.',
            offered=False,
        ),
        Option(
            "verify_off",
            Real,
            -5.0,
            'with the policy "hysteresis": verification goes on until the score is below this.',
            offered=False,
        ),
        Option(
            "verify_span",
            Length,
            8,
            'with the policy "span": a draft is verified whose first run of masks has so many.',
            offered=False,
        ),
        Option(
            "verify_cost",
            Scale,
            1.0,
            "tokens that a verification costs: the score is the number of tokens that it should accept, less"
            " this.",
        ),
        Option(
            "verify_cost_each",
            bool,
            False,
            "take `verify_cost` once for each mask that is surer than `threshold`, instead of once.",
            offered=False,
        ),
        Option(
            "verify_sharpness",
            Scale,
            1.0,
            "how fast expected acceptance falls with entropy: exp(-sharpness * entropy / ln(vocabulary)) for"
            " each token of the run.",
            offered=False,
        ),
        Option(
            "commit_sure",
            bool,
            False,
            "a verification also commits all other masks that are surer than `threshold`.",
            offered=False,
        ),
        Option(
            "causal_rows",
            bool,
            False,
            "stored rows, and those of a block before its first mask, see only the tokens before them, as"
            " those that verify do.",
            offered=False,
        ),
    ),
    table=linear,
    published=True,
)
