"""After the questions that warm up, others compile nothing."""

import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.decoding.prefilling import Prefilling
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.llm import LLM
from jdllm.serving.engine import Engine
from jdllm.serving.long.request import LongContext, long_spec
from jdllm.serving.long.warm_question import warm_questions
from tests.engines import engine_of
from tests.helpers import Golden
from tests.prefilling.asking import BOS, ends, model_of
from tests.prefilling.mixed import CONFIG, FAMILY

SETTINGS = Prefilling(chunk_length=64, chunks_kept=2, draft_length=8, bos_id=BOS)


@pytest.mark.parametrize(
    "prefilling",
    [
        SETTINGS,
        pytest.param(SETTINGS.changed(tokens_kept=16, retention="per_head"), marks=pytest.mark.slow),
        pytest.param(SETTINGS.changed(score="query", build="chunk_query"), marks=pytest.mark.slow),
    ],
    ids=["whole chunks", "few tokens", "scored by the query"],
)
@pytest.mark.slow
def test_nothing_is_compiled_afterwards(prefilling: Prefilling):
    executables = Executables("cpu")
    engine = engine_of(model_of(FAMILY)[0], CONFIG, executables, 1024, pages=400)
    sampling = SamplingParams(gen_length=32, block_length=32, early_stop=False, prefilling=prefilling)
    warm = warm_questions(lambda long: long_spec(long, sampling, CONFIG, None), CONFIG, 1024)
    ends(engine, list(warm))
    compiled = executables.compiled
    rng = np.random.default_rng(1)
    for instruction, context, query in ((32, 130, 64), (32, 300, 60), (10, 1000, 50), (0, 2000, 64)):
        ids = [rng.integers(0, 500, n).astype(np.int32) for n in (instruction, context, query, query)]
        for _ in range(2):
            specs = [long_spec(LongContext(*ids), sampling, CONFIG, None)]
            ends(engine, specs)
            assert executables.compiled == compiled, (instruction, context, query)


def test_what_the_model_cannot_do_is_refused_before_anything_is_compiled():
    with LLM(Golden("llada").directory, dtype="float32", max_num_batched_tokens=256) as llm:
        with pytest.raises(RequestError, match="score_mask"):
            llm.warmup(prefilling=SETTINGS.changed(score_mask="none"))
        assert llm.executables.compiled == 0


@pytest.mark.slow
def test_warming_up_asks_the_questions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Engine, "programs", lambda self: [])
    monkeypatch.setattr(Engine, "warm", lambda self: None)
    with LLM(Golden(FAMILY).directory, dtype="float32", max_num_batched_tokens=256) as llm:
        assert llm.warmup(prefilling=SETTINGS).compiled > 2
        assert llm.warmup(prefilling=SETTINGS).compiled == 0
