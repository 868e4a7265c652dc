"""Adaptive parallel decoding, where a verifier decides instead of a rule: its parameters."""

from jdllm.decoding.kinds import Length, Share
from jdllm.decoding.option import Option
from jdllm.decoding.transfer.rule import TransferRule

RULE = TransferRule(
    "transfer",
    "adaptive",
    "from left to right, as far as an autoregressive verifier goes along (below)",
    None,
    options=(
        Option(
            "mixture_weight",
            Share,
            0.5,
            "the diffusion model's share of the mixture; 1 accepts every draft, 0 only tokens that the"
            " verifier would have chosen.",
        ),
        Option("max_lookahead", Length, 32, "masked positions that a step drafts."),
    ),
)
