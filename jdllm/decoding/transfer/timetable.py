"""Dream's own sampler: its timetable says which share of the masked rows a step commits."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from jdllm.decoding.kinds import Scale, Share
from jdllm.decoding.option import Option
from jdllm.decoding.transfer.quota import QUOTA
from jdllm.decoding.transfer.rule import Acceptance, Measure, TransferRule

if TYPE_CHECKING:
    from jaxtyping import Array, Bool

    from jdllm.decoding.schedule import StepTable
    from jdllm.decoding.transfer.ranking import Ranked, RuleParams


def accept(ranked: "Ranked", params: "RuleParams", segments: int) -> "Bool[Array, ' rows']":
    """Rows whose draw is below `fraction`; in some steps that is none (HKUNLP/Dream, alg 'origin')."""
    return ranked.draw < params.fraction


def timetable(masks: int, steps: int, options: Mapping[str, Any]) -> "StepTable":
    """Dream's timetable."""
    # What declares parameters is read without NumPy.
    from jdllm.decoding.schedule import dream_fractions, fractions

    return fractions(dream_fractions(steps, options["eps"]))


ALG_TEMP = Option(
    "alg_temp",
    Scale,
    0.0,
    "above 0, positions are drawn from softmax(confidence / alg_temp).",
    offered=False,
)
_EPS = Option("eps", Share, 1e-3, "end of the timetable.", shown_default="1e-3", offered=False)
_QUOTA = Option(
    "quota",
    Literal["row", "batch"],
    "row",
    'the timetable counts each request\'s own masks; "batch" averages them over all such requests of the'
    " batch, as published (quirk Q18), but never commits more than a row has masks.",
    offered=False,
)

ORIGIN = Acceptance("origin", accept)


def _ranked(name: str, by: str, measure: Measure) -> TransferRule:
    return TransferRule(
        "alg",
        name,
        f"by {by}, by Dream's timetable",
        QUOTA,
        measure,
        (ALG_TEMP, _EPS, _QUOTA),
        timetable,
        "share of masked",
        published=True,
    )


RULES = (
    TransferRule(
        "alg",
        "origin",
        "by chance, by Dream's timetable",
        ORIGIN,
        options=(_EPS,),
        table=timetable,
        quota="share of masked",
        published=True,
    ),
    _ranked("maskgit_plus", "probability", Measure.PROBABILITY),
    _ranked("topk_margin", "margin", Measure.MARGIN),
    _ranked("entropy", "negative entropy", Measure.ENTROPY),
)
