"""Whatever runs on the device runs too with layers in host memory, with the same results."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.random_checkpoint import llada_hf_config, write_random_checkpoint
from jdllm import LLM, SamplingParams
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.hf_config import config_from_hf
from tests.conftest import LLADA

MIB = 2**20
ROWS = 128
PROMPTS = [[1, 2, 3] * 20, [7] * 33]
SAMPLING = SamplingParams(gen_length=32, steps=8, block_length=16)
CACHES: list[dict[str, Any]] = [
    {"cache": "none"},
    {"cache": "dual"},
    {"cache": "prefix", "temperature": 1.0, "seed": 3},
    {"cache": "sparse", "retention": 0.5},
    {"cache": "head_sparse", "retention": 0.5},
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve layers of four MiB."""
    config = dataclasses.replace(
        config_from_hf(LLADA.directory), num_layers=12, hidden_size=256, intermediate_size=1024, head_dim=64
    )
    directory = tmp_path_factory.mktemp("streamed") / "model"
    return write_random_checkpoint(directory, llada_hf_config(config, "float32"))


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, max_num_batched_tokens=ROWS, progress=False) as llm:
        yield llm


@pytest.fixture(scope="module", params=[{"memory": 60 * MIB}, {"memory": 46 * MIB, "quantization": "int8"}])
def pair(request: pytest.FixtureRequest, checkpoint: Path, whole: LLM) -> Iterator[tuple[LLM, LLM]]:
    """A model with layers in host memory, and one without."""
    options = {"max_num_batched_tokens": ROWS, "progress": False}
    other = {"quantization": form} if (form := request.param.get("quantization")) else {}
    with LLM(checkpoint, **request.param, **options) as llm:
        if other:
            with LLM(checkpoint, **other, **options) as quantised:
                yield llm, quantised
        else:
            yield llm, whole


def test_the_account_has_room_for_all(pair: tuple[LLM, LLM]):
    account = pair[0].account
    assert account.offloaded
    assert account.budget is not None
    assert account.pages > ROWS // PAGE_ROWS
    assert account.weights + account.largest_step + account.pool_bytes <= account.budget.device


@pytest.mark.parametrize("options", CACHES, ids=lambda options: options["cache"])
def test_tokens_are_those_of_the_whole_model(pair: tuple[LLM, LLM], options: dict[str, Any]):
    sampling = dataclasses.replace(SAMPLING, **options)
    found, expected = (
        [out.token_ids for out in llm.generate(prompt_token_ids=PROMPTS, sampling=sampling)] for llm in pair
    )
    assert found == expected


def test_scores_and_logits_too(pair: tuple[LLM, LLM]):
    found, expected = (llm.score([1, 2, 3], [4, 5]) for llm in pair)
    assert found == pytest.approx(expected, rel=1e-5)
    for some, right in zip(*(llm.logits([[1, 2, 3], [4, 5, 6]]) for llm in pair), strict=True):
        np.testing.assert_allclose(some, right, atol=1e-4)
