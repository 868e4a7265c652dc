"""Engines of the tiny Dream that runs over long contexts were recorded of, and what requests give alone."""

from collections.abc import Callable
from typing import Any

import pytest

from jdllm.compiling.executables import Executables
from jdllm.models.weights import Params
from jdllm.serving.engine import Engine
from tests.engines import engine_of
from tests.prefilling.asking import PAGES, ROWS, ends, model_of
from tests.prefilling.mixed import CONFIG, FAMILY, SPECS


@pytest.fixture(scope="session")
def build(executables: Executables) -> Callable[..., Engine]:
    def build(params: Params | None = None, rows: int = ROWS, pages: int = PAGES) -> Engine:
        return engine_of(params or model_of(FAMILY)[0], CONFIG, executables, rows, pages=pages)

    return build


class Alone(dict[str, Any]):
    """What each of `SPECS` gives by itself in an engine of its own, which runs once it is asked for."""

    def __init__(self, build: Callable[..., Engine]):
        super().__init__()
        self._build = build

    def __missing__(self, name: str) -> Any:
        (self[name],) = ends(self._build(), [SPECS[name]])
        return self[name]


@pytest.fixture(scope="session")
def alone(build: Callable[..., Engine]) -> dict[str, Any]:
    return Alone(build)
