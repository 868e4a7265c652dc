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
    parser.addoption("--part", default="1/1", metavar="K/N", help="the K-th of N parts of the tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one part of the tests; those of a file stay together, as they share models."""
    part, parts = map(int, str(config.getoption("--part")).split("/"))
    stops = [len(items) * k // parts for k in (part - 1, part)]
    config.hook.pytest_deselected(items=[*items[: stops[0]], *items[stops[1] :]])
    items[:] = items[slice(*stops)]


@pytest.fixture(autouse=True, scope="session")
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stand in for the default wherever a test names no kernels."""
    chosen = str(request.config.getoption("--kernels"))
    with pytest.MonkeyPatch.context() as patch, preferring(chosen):
        for kind in (LLM, Executables):
            patch.setattr(kind, "__init__", functools.partialmethod(kind.__init__, kernels=chosen))
        yield
