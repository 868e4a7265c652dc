"""A small causal model with random weights that writes bytes and some longer tokens."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jdllm.llm import LLM
from tests.conftest import BUDGET, KV_POOL
from tests.structured.writing import write_writing


@pytest.fixture(scope="package")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_writing(tmp_path_factory.mktemp("writing"), "llama")


@pytest.fixture(scope="package")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, dtype="float32", max_num_batched_tokens=BUDGET, kv_pool=KV_POOL) as llm:
        yield llm
