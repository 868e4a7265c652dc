"""Whatever runs on the device runs too with layers in host memory, with the same results."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.random_checkpoint import llada_hf_config, write_random_checkpoint
from jdllm import LLM, LongPrompt, Prefilling, SamplingParams
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import param_bytes
from tests.conftest import LLADA
from tests.helpers import Golden

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


def test_questions_over_long_contexts_too(checkpoint: Path, whole: LLM):
    cut = Prefilling(chunk_length=32, chunks_kept=2, score="query", bos_id=2)
    sampling = SamplingParams(gen_length=16, prefilling=cut)
    ids = np.random.default_rng(0).integers(1, 300, 209).tolist()
    prompt = LongPrompt(context=ids[:200], query=ids[200:], instruction=[1])
    with LLM(
        checkpoint, memory=64 * MIB, max_context=320, max_num_batched_tokens=ROWS, progress=False
    ) as llm:
        assert llm.account.offloaded
        found, expected = (one.generate(prompt, sampling=sampling)[0] for one in (llm, whole))
    assert found.token_ids == expected.token_ids
    assert found.prefilling is not None
    assert expected.prefilling is not None
    assert found.prefilling.selected == expected.prefilling.selected


def test_scores_and_logits_too(pair: tuple[LLM, LLM]):
    found, expected = (llm.score([1, 2, 3], [4, 5]) for llm in pair)
    assert found == pytest.approx(expected, rel=1e-5)
    for some, right in zip(*(llm.logits([[1, 2, 3], [4, 5, 6]]) for llm in pair), strict=True):
        np.testing.assert_allclose(some, right, atol=1e-4)


SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "head_dim": 64}
OTHERS: dict[str, dict[str, int]] = {
    "dream": SIZES,
    "llama": SIZES,
    "sdar": SIZES,
    "llada2": SIZES | {"moe_intermediate_size": 64, "num_experts": 16, "mask_token_id": 11},
}


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_run_too(family: str, tmp_path: Path):
    """Causal models, those of blocks, and a mixture of experts whose first layer has none."""
    values = json.loads((Golden(family).directory / "config.json").read_text())
    values |= OTHERS[family] | {"torch_dtype": "float32"}
    checkpoint = write_random_checkpoint(tmp_path / family, values)
    weights = param_bytes(config_from_hf(checkpoint), "float32")
    options = {"max_num_batched_tokens": ROWS, "progress": False}
    sampling = SamplingParams(gen_length=16)
    found: list[list[list[int]]] = []
    for memory in (None, weights + 20 * MIB):
        with LLM(checkpoint, memory=memory, host_memory="1GiB", **options) as llm:
            assert bool(llm.account.offloaded) == (memory is not None)
            outputs = llm.generate(prompt_token_ids=[prompt[:40] for prompt in PROMPTS], sampling=sampling)
            found.append([out.token_ids for out in outputs])
    assert found[0] == found[1]
