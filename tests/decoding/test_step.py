"""The step function: when a dispatch stops, what it writes, and how much memory its head takes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jdllm.chunks import ChunkConfig
from jdllm.compiling.executables import Executables
from jdllm.decoding.batch import Batch, Trace
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.step import denoise
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, abstract_params
from jdllm.pallas.masked_logits import Level
from jdllm.serving.request import Request
from tests.engines import generation_request, pack_all
from tests.pallas.jaxprs import largest_intermediate

MASK = 510


def request(config: ModelConfig, **options) -> Request:
    return generation_request(0, np.arange(5), SamplingParams(**{"gen_length": 8, **options}), config)


@pytest.fixture(scope="module")
def run(params: Params, config: ModelConfig, executables: Executables):
    def run(batch: Batch, max_steps: int) -> Trace:
        trace = executables.call(
            denoise,
            params,
            batch,
            np.int32(max_steps),
            config=config,
            mask_id=MASK,
            chunks=ChunkConfig(),
            level=Level.TOP,
        )
        return jax.device_get(trace)

    return run


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([{"steps": 8}, {"steps": 2}, {"steps": 4}], 2),
        ([{"steps": 8}, {"block_length": 4, "steps": 8}], 4),
        ([{"steps": 8}], 8),
    ],
)
def test_stops_when_any_segment_finishes_its_block(
    options: list[dict], expected: int, run, config: ModelConfig
):
    trace = run(pack_all([request(config, **o) for o in options], config).batch, 64)
    assert trace.steps == expected


@pytest.mark.parametrize("max_steps", [0, 1, 3])
def test_stops_after_max_steps(max_steps: int, run, config: ModelConfig):
    trace = run(pack_all([request(config)], config).batch, max_steps)
    assert trace.steps == max_steps
    assert trace.committed.sum() == max_steps
    assert not trace.committed[max_steps:].any()


def test_stops_when_nothing_is_masked_any_more(run, config: ModelConfig):
    assert run(pack_all([request(config, gen_length=3, steps=9)], config).batch, 64).steps == 3


def test_padding_never_commits_and_masked_rows_commit_once(run, config: ModelConfig):
    packed = pack_all([request(config, steps=2), request(config, steps=2, cfg_scale=1.0)], config)
    trace = run(packed.batch, 64)
    real = sum(map(len, packed.candidates))
    assert real < packed.batch.head.row.shape[0]
    assert (trace.committed.sum(axis=0)[:real] == 1).all()
    assert not trace.committed[:, real:].any()
    assert not (trace.tokens[trace.committed] == MASK).any()


class TestMemory:
    """Logits exist for one chunk of the head rows, never for all of them or for other rows."""

    vocab, head = 32768, 1024

    @pytest.mark.slow
    @pytest.mark.parametrize("level", Level)
    @pytest.mark.parametrize("chunks", [1, 2, 8])
    def test_the_largest_array_is_a_chunk_of_logits(self, chunks: int, level: Level, config: ModelConfig):
        wide = dataclasses.replace(config, vocab_size=self.vocab)
        sampling = SamplingParams(gen_length=self.head)
        batch = pack_all([generation_request(0, np.zeros(3072, int), sampling, wide)], wide).batch
        assert batch.head.row.shape == (self.head,)
        assert len(batch.tokens) >= 4096
        split = ChunkConfig(logits=chunks)
        static = {"config": wide, "mask_id": MASK, "chunks": split, "level": level}
        run = functools.partial(denoise, **static)
        largest = largest_intermediate(run, abstract_params(wide, "float32"), batch, np.int32(64))
        assert largest == self.head // chunks * self.vocab
