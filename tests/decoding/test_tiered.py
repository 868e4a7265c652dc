"""A step driven by the host chooses and commits what the step on the device does."""

import gc

import jax
import numpy as np
import pytest

from jdllm.checkpoints.loading import load_params
from jdllm.chunks import ChunkConfig
from jdllm.compiling.executables import Executables
from jdllm.decoding import tiered
from jdllm.decoding.batch import Batch, Trace
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.step import denoise
from jdllm.decoding.tiered import denoise_tiered, head_buffers
from jdllm.execution.offload.tiers import HostTiers
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import Params
from jdllm.pallas.masked_logits import Level
from jdllm.serving.request import Request
from tests.engines import generation_request, pack_all
from tests.helpers import Golden

RESIDUAL = HostTiers(128)
GROUPS = HostTiers(128, head_groups=2)
KEYS_VALUES = HostTiers(128, kv=True)
WIDE = HostTiers(256, kv=True)

LLADA = [
    {"gen_length": 40, "steps": 8},
    {"gen_length": 30, "steps": 5, "cfg_scale": 1.5},
    {"gen_length": 21, "steps": 7, "temperature": 0.7, "seed": 3},
]
DREAM = [
    {"gen_length": 40, "steps": 8, "alg": "entropy"},
    {"gen_length": 30, "steps": 5, "cfg_scale": 1.5},
    {"gen_length": 21, "steps": 7, "alg": "origin", "temperature": 0.7, "seed": 3},
]
LOGITS_CHUNKS = 3


def slow(tiers: HostTiers):
    return pytest.param(tiers, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def executables() -> Executables:
    return Executables("cpu")


def requests(config: ModelConfig, options: list[dict]) -> list[Request]:
    """Prompts of such lengths that sequences and their masks cross the bounds of chunks."""
    rng = np.random.default_rng(0)
    return [
        generation_request(i, rng.integers(0, 450, 105 + 5 * i), SamplingParams(**o), config)
        for i, o in enumerate(options)
    ]


def step(
    params: Params, config: ModelConfig, batch: Batch, tiers: HostTiers | None, executables: Executables
) -> Trace:
    """One step by the device, or by the host with `tiers`."""
    level = Level.MOMENTS if batch.segments.control is None else Level.FILTERED
    static = {"config": config, "mask_id": config.mask_id, "level": level}
    if tiers is None:
        chunks = ChunkConfig(logits=LOGITS_CHUNKS)
        trace = executables.call(denoise, params, batch, np.int32(1), chunks=chunks, **static)
    else:
        trace = denoise_tiered(
            params, batch, tiers=tiers, logits_chunks=LOGITS_CHUNKS, executables=executables, **static
        )
    return jax.device_get(trace)


def compare(
    params: Params, config: ModelConfig, options: list[dict], tiers: HostTiers, executables: Executables
) -> None:
    """Two steps, the second of which finds some rows unmasked."""
    running = requests(config, options)
    for _ in range(2):
        batch, candidates = pack_all(running, config)
        expected = step(params, config, batch, None, executables)
        actual = step(params, config, batch, tiers, executables)
        assert actual.steps == expected.steps == 1
        masked = np.flatnonzero(batch.head.segment < len(options))
        assert len(masked) == sum(map(len, candidates)) > 60
        np.testing.assert_array_equal(actual.tokens[:, masked], expected.tokens[:, masked])
        np.testing.assert_array_equal(actual.committed, expected.committed)
        assert actual.committed[0].any()
        assert not actual.committed[0, masked].all()
        first = 0
        for request, positions in zip(running, candidates, strict=True):
            part = slice(first, first := first + len(positions))
            taken = actual.committed[0, part]
            request.advance(
                positions[taken], *(np.asarray(x)[0, part][taken] for x in (actual.tokens, actual.logprobs))
            )


@pytest.mark.parametrize("tiers", [RESIDUAL, slow(GROUPS), slow(KEYS_VALUES), WIDE])
@pytest.mark.slow
def test_guidance_and_temperature(
    tiers: HostTiers, params: Params, config: ModelConfig, executables: Executables
):
    compare(params, config, LLADA, tiers, executables)


@pytest.mark.parametrize("tiers", [GROUPS, slow(WIDE)])
@pytest.mark.slow
def test_shifted_logits(
    tiers: HostTiers, dream_params: Params, dream_config: ModelConfig, executables: Executables
):
    compare(dream_params, dream_config, DREAM, tiers, executables)


@pytest.mark.slow
def test_controls(params: Params, config: ModelConfig, executables: Executables):
    """Of some requests; positions from which an end is allowed lie in several chunks."""
    ends = (3, 9)
    own = {"min_tokens": 20, "stop_token_ids": ends, "logit_bias": dict.fromkeys(ends, 9.0)}
    controls = [own, {"allowed_token_ids": tuple(range(40, 90))}]
    options = [one | more for one, more in zip(LLADA, [*controls, *[{}] * len(LLADA)], strict=False)]
    compare(params, config, options, RESIDUAL, executables)


@pytest.mark.slow
def test_experts(executables: Executables):
    config = config_from_hf(Golden("llada_moe").directory)
    params = load_params(Golden("llada_moe").directory, config, "float32")
    compare(params, config, LLADA, RESIDUAL, executables)


@pytest.mark.slow
def test_no_step_where_a_segment_has_finished_its_block(
    params: Params, config: ModelConfig, executables: Executables
):
    batch = pack_all(requests(config, LLADA), config).batch
    filled = np.where(np.arange(len(batch.tokens)) < 200, 7, batch.tokens)
    for tiers in (None, RESIDUAL):
        trace = step(params, config, batch._replace(tokens=filled), tiers, executables)
        assert trace.steps == 0
        assert not trace.committed.any()


@pytest.mark.parametrize("tiers", [RESIDUAL, slow(WIDE)])
@pytest.mark.slow
def test_arrays_on_the_device_are_those_listed(
    tiers: HostTiers, params: Params, config: ModelConfig, executables: Executables, monkeypatch
):
    batch = pack_all(requests(config, LLADA), config).batch
    peak, call = 0, executables.call

    def measured(function, *args, **options):
        nonlocal peak
        out = call(function, *args, **options)
        if function in (tiered.take_rows, tiered.decide_window):
            peak = max(peak, alive() - before)
        return out

    def alive() -> int:
        arrays = [x for x in jax.live_arrays() if x.sharding.memory_kind == "device"]
        return sum({x.unsafe_buffer_pointer(): x.nbytes for x in arrays}.values())

    monkeypatch.setattr(executables, "call", measured)
    gc.collect()
    before = alive()
    step(params, config, batch, tiers, executables)
    listed = head_buffers(config, tiers, -(-len(batch.head.row) // LOGITS_CHUNKS), "float32")
    assert 0.7 * sum(listed.values()) < peak <= sum(listed.values())
