"""Requests of all modes go on with the same tokens where the stored rows are lost."""

from typing import Any

import jax
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from jdllm.serving.demands import Kind
from jdllm.serving.updates import Ended
from tests.blocks.recorded_nemotron import NEMOTRON

PROMPT = list(range(200, 290))
SIZES: dict[str, Any] = {"kv_pool": "1MiB", "progress": False}


@pytest.mark.parametrize("mode", ["diffusion", "bidirectional", "autoregressive", "self_speculation"])
@pytest.mark.parametrize("parts", [5, 12])
def test_a_lost_pool_is_computed_again(mode: Any, parts: int, monkeypatch: pytest.MonkeyPatch):
    """Another's prompt takes the pool."""
    sampling = SamplingParams(gen_length=80, early_stop=False, generation_mode=mode)
    rows = 192 if mode == "bidirectional" else 128  # for the whole prompt
    with LLM(NEMOTRON.directory, max_num_batched_tokens=rows, **SIZES) as llm:
        [expected] = llm.generate(prompt_token_ids=[PROMPT], sampling=sampling)
        engine, updates = llm.engine, list[Any]()
        engine.pool.forget_contents()
        first = engine.add(llm.spec(PROMPT, sampling), updates="every")
        for _ in range(parts):
            updates += engine.step()
        launch = engine.parts.launchers[Kind.PREFILL]

        def failing(requests: Any, steps: int) -> Any:
            def fail() -> Any:
                jax.tree.leaves(engine.pool.device())[0].delete()
                raise RuntimeError("the device failed")

            return launch(requests, steps)._replace(run=fail)

        autoregressive = SamplingParams(gen_length=4, generation_mode="autoregressive")
        with monkeypatch.context() as patched:
            patched.setitem(engine.parts.launchers, Kind.PREFILL, failing)
            second = engine.add(llm.spec([201, 202, 203], autoregressive))
            while not any(isinstance(update, Ended) for update in updates):
                updates += engine.step()
        while not engine.idle:
            updates += engine.step()
        ended = {update.request: update for update in updates if isinstance(update, Ended)}
        assert str(ended[second].error) == "the device failed"
        assert ended[first].error is None
        state = ended[first].state
        assert state.tokens[state.returned].tolist() == expected.token_ids
        assert engine.stats().rebuilt == 1
        assert engine.stats().free_pages == engine.stats().pages
