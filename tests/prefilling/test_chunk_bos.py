"""Chunks that begin with no token of their own: the engine gives what the oracle gives, stage by stage.

No run was recorded without `chunk_bos`. So the recorded questions are asked without it, and the oracle, which
reproduces every recorded run, answers beside the engine.
"""

import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.serving.engine import Engine
from jdllm.serving.long.request import LongContext, long_spec
from tests.engines import engine_of
from tests.helpers import slow
from tests.prefilling.asking import PAGES, ROWS, end, ids_of, model_of
from tests.prefilling.recorded import Case, run
from tests.prefilling.settings import sampling_of


@pytest.fixture(scope="module")
def engine(executables: Executables) -> Engine:
    return engine_of(*model_of("prefilling_dllm"), executables, ROWS, pages=PAGES)


@pytest.mark.parametrize(
    "name",
    [
        "best47_self_information",
        slow("best47"),
        slow("sparse_global"),
        slow("sparse_per_head_last_layer"),
        slow("chunk_query_reuse"),
        slow("chunk_only"),
        slow("absolute_tail_keepfirst"),
    ],
)
def test_a_question_is_answered_without_a_token_before_each_chunk(engine: Engine, name: str):
    case = Case(name, (("chunk_bos", False),))
    expected = run(case)
    parts = ids_of(case, "prefix"), ids_of(case, "context"), case["query_ids"], case.scoring_query
    sampling = sampling_of(case.settings, case.bos_id)
    request = end(engine, long_spec(LongContext(*parts), sampling, model_of("prefilling_dllm")[1], None))
    chunks = request.long_spec.chunks
    np.testing.assert_array_equal(np.concatenate([chunk.tokens for chunk in chunks]), parts[1])
    found = request.prefilled
    if len(expected.draft.tokens):
        np.testing.assert_array_equal(found.draft, expected.draft.tokens)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=0, atol=5e-5)
    assert found.selected == list(expected.selected)
    for mine, theirs in zip(found.kept, expected.kept, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(request.tokens[request.returned], expected.decoded.output)
    assert not np.array_equal(request.tokens[request.returned], case["output"])
