"""Fast-dLLM's factor rule: a threshold that depends on how many rows commit together."""

from typing import TYPE_CHECKING, Literal

from jdllm.decoding.kinds import Scale
from jdllm.decoding.option import Option
from jdllm.decoding.transfer.rule import Acceptance, TransferRule

if TYPE_CHECKING:
    from jaxtyping import Array, Bool

    from jdllm.decoding.transfer.ranking import Ranked, RuleParams


def accept(ranked: "Ranked", params: "RuleParams", segments: int) -> "Bool[Array, ' rows']":
    """Rows before the first one, in falling confidence, that fails its own threshold.

    The row of rank k passes with confidence at least 1 - factor / (k + 2); rank 0 always passes. With an open
    end a failure at the very last rank is overlooked, as the published loop does (quirk Q8).
    """
    factor, open_end = params.options["factor"], params.options["factor_end"]
    passes = (ranked.confidence >= 1 - factor / (ranked.rank + 2)) | (ranked.rank == 0)
    last = ranked.rank == ranked.count - 1
    return ranked.rank < ranked.first_rank(~passes & ~(open_end & last), segments)


def _open_end(end: str) -> bool:
    return end == "official"


_HELP = (
    "slope of the factor rule. The published loop overlooks a failure at its very last row (quirk Q8);"
    ' "fixed" does not.'
)

ACCEPTANCE = Acceptance("factor", accept)
RULE = TransferRule(
    "transfer",
    "factor",
    "as many as their number justifies by `factor` (Fast-dLLM)",
    ACCEPTANCE,
    options=(
        Option("factor", Scale, 1.0, _HELP, float),
        Option("factor_end", Literal["official", "fixed"], "official", _HELP, _open_end, offered=False),
    ),
)
