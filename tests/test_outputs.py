"""Outputs compare, pickle and dump; with a history too."""

import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest

from jdllm.outputs import CompletionOutput, RequestOutput
from jdllm.serving.request import Timings

HISTORY = np.array([[1, 510, 510], [1, 2, 510], [1, 2, 3]], np.int32)


def output(*, timings: Timings | None = None, **fields: Any) -> RequestOutput:
    given = {"text": "bc", "token_ids": [2, 3], "finish_reason": "stop", "nfe": 3, "history": HISTORY.copy()}
    given |= {"logprobs": [-0.5, -0.25], "committed_in": [1, 0], **fields}
    sample = CompletionOutput(index=0, timings=timings or Timings(0.5, 1.5), **given)
    return RequestOutput("a", [1], 2**64 - 1, [sample])


def test_equal_results_are_equal_whatever_time_they_took():
    assert output() == output(timings=Timings(1, 2))
    assert output(history=None) == output(history=None)
    assert output() != "output"
    assert output().outputs[0] != output()


@pytest.mark.parametrize(
    "fields",
    [
        {"history": None},
        {"history": HISTORY[:2]},
        {"history": HISTORY + 1},
        {"token_ids": [2, 4]},
        {"text": None},
        {"finish_reason": "length"},
        {"nfe": 4},
        {"logprobs": [-0.5, -0.5]},
        {"top_logprobs": [{2: -0.5}, {3: -0.5}]},
        {"committed_in": [0, 1]},
        {"generation_mode": "autoregressive"},
    ],
)
def test_other_results_are_not(fields: dict[str, Any]):
    assert output() != output(**fields)
    assert output(**fields) != output()


def test_hashing_is_refused_by_name():
    with pytest.raises(TypeError, match="unhashable type: 'RequestOutput'"):
        hash(output())
    with pytest.raises(TypeError, match="unhashable type: 'CompletionOutput'"):
        hash(output().outputs[0])
    assert hash(Timings(1, 2)) == hash(Timings(1, 2))


def test_a_pickled_copy_is_the_same():
    copy = pickle.loads(pickle.dumps(output()))
    assert copy == output()
    assert copy.timings == output().timings
    np.testing.assert_array_equal(copy.history, HISTORY)


def test_json():
    sample = {
        "index": 0,
        "text": "bc",
        "token_ids": [2, 3],
        "finish_reason": "stop",
        "nfe": 3,
        "timings": {"queued": 0.5, "running": 1.5, "total": 2.0},
        "history": HISTORY.tolist(),
        "logprobs": [-0.5, -0.25],
        "committed_in": [1, 0],
        "top_logprobs": None,
        "prefilling": None,
        "num_cached_tokens": None,
        "generation_mode": None,
    }
    expected = {"prompt": "a", "prompt_token_ids": [1], "seed": 2**64 - 1, "outputs": [sample]}
    assert json.loads(output().to_json()) == expected
    assert output().to_dict() == expected
    assert json.loads(output(history=None).to_json())["outputs"][0]["history"] is None
    assert dataclasses.asdict(output(history=None))["outputs"][0]["timings"] == {
        "queued": 0.5,
        "running": 1.5,
    }
