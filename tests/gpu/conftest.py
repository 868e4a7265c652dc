"""Tests on cards by the kernels that `--kernels` names, as `LLM` takes them."""

import functools
from collections.abc import Iterator
from typing import get_args

import pytest

from jdllm.compiling.executables import Executables
from jdllm.llm import LLM
from jdllm.pallas.device import Kernels, preferring


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", choices=get_args(Kernels), default="auto")


@pytest.fixture(autouse=True, scope="session")
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stand in for the default wherever a test names no kernels."""
    chosen = str(request.config.getoption("--kernels"))
    with pytest.MonkeyPatch.context() as patch, preferring(chosen):
        for kind in (LLM, Executables):
            patch.setattr(kind, "__init__", functools.partialmethod(kind.__init__, kernels=chosen))
        yield
