"""Controls of logits of requests over long contexts: against a ban that every step knows."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jdllm.serving.engine import Engine
from tests.prefilling.asking import asked, ends, question
from tests.prefilling.mixed import CONFIG

OPTIONS: dict[str, Any] = {"gen_length": 10, "block_length": 6, "threshold": 0.3, "return_history": False}


@pytest.mark.slow
def test_ways_to_ban_the_end_agree(build: Callable[..., Engine]):
    """Builds that open a block, and the steps behind them; positions begin behind the chunks that stay."""
    free = ends(build(), [asked(question(42), CONFIG, **OPTIONS)])[0]
    tokens = free.tokens[free.returned].tolist()
    end = max(set(tokens), key=tokens.count)
    config = dataclasses.replace(CONFIG, eos_id=end, eot_id=None, more_eos_ids=())
    ways: list[dict[str, Any]] = [
        {"logits_eos_inf": True},
        {"allowed_token_ids": [i for i in range(config.vocab_size) if i != end]},
        {"logit_bias": {end: -100}},
        {"min_tokens": 10},
        {"min_tokens": 4, "logit_bias": {end: 100}},
    ]
    specs = [asked(question(42), config, **OPTIONS, **way) for way in ways]
    banned, *others, partly = (r.tokens[r.returned].tolist() for r in ends(build(), specs))
    assert end not in banned != tokens
    assert others == [banned] * 3
    np.testing.assert_array_equal(np.array(partly) == end, [False] * 4 + [True] * 6)
