"""The engine gives what the published code was recorded to give, stage by stage."""

import numpy as np
import pytest

from jdllm.checkpoints.loading import load_params
from jdllm.compiling.executables import Executables
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import Params
from jdllm.serving.engine import Engine
from jdllm.serving.long.request import LongContext, LongRequest, long_spec
from jdllm.serving.updates import Ended
from tests.engines import engine_of
from tests.helpers import slow
from tests.prefilling.asking import PAGES, ROWS
from tests.prefilling.recorded import GOLDEN, Case, case_names
from tests.prefilling.settings import sampling_of

LONG = {
    "best47",
    "best47_rounds0_draft6",
    "best47_score_bidirectional",
    "defaults_full_prompt",
    "sparse_global",
    "sparse_per_head",
    "sparse_per_head_last_layer",
    "sparse_per_head_pool3",
    "sparse_variant",
}
"""Runs that compile much for themselves."""


@pytest.fixture(scope="module")
def model() -> tuple[Params, ModelConfig]:
    config = config_from_hf(GOLDEN.directory)
    return load_params(GOLDEN.directory, config, "float32"), config


@pytest.fixture(scope="module")
def engine(model: tuple[Params, ModelConfig], executables: Executables) -> Engine:
    return engine_of(*model, executables, ROWS, pages=PAGES)


def run(engine: Engine, config: ModelConfig, name: str) -> LongRequest:
    case = Case(name)
    long = LongContext(
        case["prefix_ids"] if "prefix_ids" in case else np.zeros(0, np.int32),
        case["context_ids"] if "context_ids" in case else np.zeros(0, np.int32),
        case["query_ids"],
        case.scoring_query,
    )
    spec = long_spec(long, sampling_of(case.settings, case.bos_id), config, None)
    (ended,) = [update for update in engine.run([spec]) if isinstance(update, Ended)]
    if ended.error is not None:
        raise ended.error
    assert isinstance(ended.state, LongRequest)
    return ended.state


@pytest.mark.parametrize("name", [slow(name) if name in LONG else name for name in case_names()])
def test_a_recorded_run_is_reproduced(engine: Engine, model: tuple[Params, ModelConfig], name: str):
    case, request = Case(name), run(engine, model[1], name)
    found = request.prefilled
    if "draft_states" in case:
        np.testing.assert_array_equal(found.draft, case["draft_states"][-1])
    if "chunk_scores" in case:
        np.testing.assert_allclose(found.scores, case["chunk_scores"], rtol=0, atol=5e-5)
    np.testing.assert_array_equal(found.selected, case["selected"])
    for i, kept in case.many("keep").items():
        np.testing.assert_array_equal(found.kept[i], kept)
    np.testing.assert_array_equal(request.tokens[request.returned], case["output"])
