"""Agreement of requests alone and in company."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.quality.cells import ALL_POLICIES
from benchmarks.quality.company import measure, settings
from jdllm.demo.tokenizer import EOS


class Stub:
    """A model whose second request loses a token in company, and whose answers end after three."""

    def generate(self, *, prompt_token_ids: Any, sampling: Any) -> list[SimpleNamespace]:
        answers = [np.array([p[0], 5, EOS, 9]) for p in prompt_token_ids]
        if len(answers) > 1:
            answers[1][1] = 6
        return [SimpleNamespace(token_ids=answer) for answer in answers]


def test_each_cache_is_paired_with_both_rules():
    kinds = {(s.cache, s.transfer) for s in settings(2 * len(ALL_POLICIES))}
    assert len(kinds) == 2 * len(ALL_POLICIES)


def test_a_lost_token_shows_in_its_cache_only():
    stub: Any = Stub()
    rows = measure(stub, [[i] for i in range(2 * len(ALL_POLICIES))], "bfloat16")
    assert [row["requests"] for row in rows] == [2] * len(ALL_POLICIES)
    by_cache = {row["cache"]: (row["same_tokens"], row["same_answers"]) for row in rows}
    assert by_cache.pop(ALL_POLICIES[1]) == (5 / 6, 0.5)
    assert set(by_cache.values()) == {(1.0, 1.0)}
