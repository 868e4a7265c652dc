"""Transfer rules: which of the evaluated rows commit their token in this step."""

from jdllm.decoding.transfer.ranking import Candidates, Measure, Ranked, RuleParams
from jdllm.decoding.transfer.registry import Rule, select

__all__ = ["Candidates", "Measure", "Ranked", "Rule", "RuleParams", "select"]
