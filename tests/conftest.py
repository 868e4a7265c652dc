"""Fixtures that many files share: the recorded LLaDA data, and models that are compiled once a session."""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import settings
from jax.experimental.compilation_cache import compilation_cache

from jdllm.byte_sizes import parse_bytes
from jdllm.checkpoints.loading import load_params
from jdllm.compiling import store as executable_store
from jdllm.compiling.executables import Executables
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import Params
from jdllm.planning import account
from jdllm.serving.background import Background
from tests.helpers import Golden

pytest_plugins = ["tests.parts"]

LLADA, DREAM = Golden("llada"), Golden("dream")
STOPS = {"eos_token_id": 228, "eot_token_id": 227}
"""Ids that the tiny checkpoint generates often."""

MAX_POSITIONS = 80
"""What `stopping_llm` states."""

# Fixtures run steps of at most 64 rows: few shapes to compile, and batches that do not fit at once.
BUDGET = 64
# Two short requests of Dream, or a long one: at most 32 rows of the head.
DREAM_BUDGET = 50

KV_POOL = "16MiB"
"""A few thousand tokens: several models share a device, a card too."""

# The interpreter of kernels runs a computation for each warpgroup, and these wait for each other: with fewer
# threads than warpgroups they would wait forever. Both are read when the backend starts.
os.environ.setdefault("NPROC", "16")
if os.environ.get("JAX_PLATFORMS") == "cpu":
    # Most of the time is compiling for the CPU.
    jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_cpu_enable_async_dispatch", False)


def _take_a_card() -> None:
    """Share out the cards among the processes of one run."""
    process = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    cards = os.environ.get("JDLLM_TEST_CARDS", "").split()
    if cards and process.isdigit():
        os.environ["CUDA_VISIBLE_DEVICES"] = cards[int(process) % len(cards)]


_take_a_card()


def pytest_configure(config: pytest.Config) -> None:
    """Compiled programs are kept between runs, and what one process compiles others take from it."""
    if not config.pluginmanager.hasplugin("cacheprovider"):
        return
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture
def no_compilation_cache() -> Iterator[None]:
    """JAX's own cache is off: what it has, of other tests too, cannot be serialised again."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


_MAPPINGS = 25_000
"""Memory mappings of a process, of which Linux allows 65,530: each compiled program takes hundreds."""

_GROWN = 5_000
"""So many mappings more are worth a collection: models of files that have ended are cycles."""

_SHARED = 48
"""Executables that the tests of a session share, of some 500 mappings each."""


def _mappings() -> int:
    """How many this process has; 0 where the system does not tell."""
    path = Path("/proc/self/maps")
    return len(path.read_bytes().splitlines()) if path.exists() else 0


@pytest.fixture(scope="session")
def _left_mappings() -> list[int]:
    """One number: how many mappings were left after the last collection."""
    return [0]


@pytest.fixture(autouse=True, scope="module")
def _few_mappings(_left_mappings: list[int]) -> Iterator[None]:
    """Give compiled programs up between files before their process may map no more memory, and aborts."""
    yield
    if _mappings() < _left_mappings[0] + _GROWN:
        return
    gc.collect()
    if _mappings() > _MAPPINGS:
        jax.clear_caches()
        gc.collect()
    _left_mappings[0] = _mappings()


account.UNPLANNED_POOL = parse_bytes(KV_POOL)

# Models of tests keep nothing unless a test says where: writing executables takes longer than having them.
DEFAULT_STORE = executable_store.default_store
executable_store.default_store = lambda: None

# Nor is anything compiled that no test waits for.
IDLE = Background.idle
Background.idle = property(lambda _: False)  # pyright: ignore[reportAttributeAccessIssue]

settings.register_profile("jdllm", deadline=None, derandomize=True)
settings.load_profile("jdllm")


@pytest.fixture(scope="session")
def goldens() -> dict[str, np.ndarray]:
    """Inputs, logits and hidden states of the published code on the tiny checkpoint."""
    return LLADA.tensors()


@pytest.fixture(scope="session")
def trajectories() -> dict[str, np.ndarray]:
    """Every step of the published samplers on the tiny checkpoint."""
    return LLADA.tensors("trajectories")


@pytest.fixture(scope="session")
def cases() -> dict[str, dict[str, Any]]:
    """The settings of each recorded trajectory."""
    return LLADA.json("trajectories")["cases"]


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return config_from_hf(LLADA.directory)


@pytest.fixture(scope="session")
def params(config: ModelConfig) -> Params:
    return load_params(LLADA.directory, config, "float32")


@pytest.fixture(scope="session")
def executables() -> Executables:
    """Compiled functions, shared by tests that build their own engines and by `shared_executables`.

    Few of them: they stay for the session, and `_few_mappings` cannot give them up.
    """
    return Executables("cpu", capacity=_SHARED)


@contextlib.contextmanager
def _taking(executables: Executables) -> Iterator[None]:
    """Every `LLM` made inside takes `executables` instead of compiling what it needs itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jdllm.llm.Executables", lambda platform, store, kernels: executables)
        yield


@pytest.fixture(scope="module")
def shared_executables(executables: Executables) -> Iterator[None]:
    """Models of a file take what others of the session have compiled, whatever their weights are."""
    with _taking(executables):
        yield


@pytest.fixture(scope="session")
def llm(config: ModelConfig, params: Params, executables: Executables) -> LLM:
    """The tiny checkpoint in f32, from memory."""
    with _taking(executables):
        return LLM(Transformer(config, params), max_num_batched_tokens=BUDGET, kv_pool=KV_POOL)


@pytest.fixture(scope="session")
def stopping_llm(executables: Executables) -> LLM:
    """The same from its directory, with the ids of `STOPS` for the ends and few positions."""
    overrides = {**STOPS, "max_sequence_length": MAX_POSITIONS}
    with _taking(executables):
        return LLM(
            LLADA.directory,
            dtype="float32",
            max_num_batched_tokens=BUDGET,
            kv_pool=KV_POOL,
            hf_overrides=overrides,
        )


@pytest.fixture(scope="session")
def dream_config() -> ModelConfig:
    return config_from_hf(DREAM.directory)


@pytest.fixture(scope="session")
def dream_params(dream_config: ModelConfig) -> Params:
    return load_params(DREAM.directory, dream_config, "float32")


@pytest.fixture(scope="session")
def dream_llm(dream_config: ModelConfig, dream_params: Params, executables: Executables) -> LLM:
    """The tiny Dream, whose logits are shifted, in f32."""
    model = Transformer(dream_config, dream_params)
    with _taking(executables):
        return LLM(model, max_num_batched_tokens=DREAM_BUDGET, kv_pool=KV_POOL)


@pytest.fixture(scope="session")
def moe_llm() -> LLM:
    """The tiny LLaDA-MoE in f32, one request at a time."""
    return LLM(Golden("llada_moe").directory, dtype="float32", max_num_batched_tokens=1, kv_pool=KV_POOL)
