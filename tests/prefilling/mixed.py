"""Requests of many kinds, over long contexts and without, for tests that run them together."""

from typing import Any

import numpy as np

from jdllm.decoding.sampling import SamplingParams
from jdllm.serving.long.request import LongRequest, LongSpec
from jdllm.serving.request import Request
from jdllm.serving.spec import RequestSpec, generation_spec
from tests.prefilling.asking import asked, config_of, question, same

FAMILY = "prefilling_dllm"
CONFIG = config_of(FAMILY)


def long(content: int, prefilling: dict[str, Any] | None = None, **sampling: Any) -> LongSpec:
    return asked(question(content), CONFIG, prefilling=prefilling, **sampling)


def ordinary(content: int, length: int, **sampling: Any) -> RequestSpec:
    prompt = np.random.default_rng(content).integers(0, 500, length)
    given = {"gen_length": 8, "block_length": 4, "early_stop": False, "return_history": True}
    return generation_spec(prompt, SamplingParams(**{**given, **sampling}), CONFIG)


SPECS = {
    "whole": long(41, threshold=0.3),
    "two blocks": long(42, {"build": "chunk_query", "score": "query"}, gen_length=10, block_length=6),
    "few tokens": long(43, {"tokens_kept": 12, "retention": "per_head", "retention_pool": 3}, gen_length=5),
    "one by one": long(44, {"build": "full_query"}, gen_length=3, block_length=1),
    "drawn": long(
        45,
        {"build": "chunk_only", "draft_rounds": None},
        temperature=0.9,
        seed=7,
        gen_length=16,
        logprobs=5,
    ),
    "quota": long(46, transfer="schedule", threshold=None, steps=4),
    "margin": long(47, {"score_mask": "none"}, transfer="margin", threshold=None, gen_length=6),
    "exact": ordinary(1, 30),
    "dual": ordinary(2, 70, cache="dual"),
    "prefix": ordinary(3, 150, cache="prefix", temperature=0.5, seed=3),
}


def alike(found: Request, expected: Request) -> None:
    if isinstance(found, LongRequest) and isinstance(expected, LongRequest):
        same(found, expected)
    np.testing.assert_array_equal(found.history, expected.history)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found.committed_in, expected.committed_in)
    ids, values = (found.likeliest[name] for name in ("id", "logprob"))
    np.testing.assert_array_equal(ids, expected.likeliest["id"])
    np.testing.assert_allclose(values, expected.likeliest["logprob"], rtol=1e-4, atol=1e-4)
