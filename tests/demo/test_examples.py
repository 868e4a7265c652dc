"""What the page offers to try: the bundled model does it."""

import pytest

from jdllm.demo import checkpoint_path
from jdllm.demo.examples import EXAMPLES, PROMPTS
from jdllm.llm import LLM

ANSWERS = (
    *("1801", "375", "dffiinosu", "egaugnal", "baaa", ")])", "456"),
    "The hats are blue.",
)


def test_every_mode_has_examples_and_every_infilling_a_slot():
    assert set(EXAMPLES) == {"complete", "chat", "infill"}
    assert all("⟦" in text for text in EXAMPLES["infill"])


@pytest.mark.slow
def test_the_model_answers_them_right():
    with LLM(checkpoint_path(), dtype="float32", max_num_batched_tokens=256) as llm:
        assert [llm.generate([prompt])[0].text for prompt in PROMPTS] == list(ANSWERS)
        assert [llm.chat(prompt)[0].text for prompt in PROMPTS] == list(ANSWERS)
