"""Layers out of host memory: the model's values, and what is on the device meanwhile."""

import dataclasses
import gc
from pathlib import Path

import jax
import numpy as np
import pytest

from jdllm.checkpoints.loading import load_by_layer, load_params
from jdllm.chunks import ChunkConfig
from jdllm.compiling.executables import Executables
from jdllm.execution.offload import layer_stream
from jdllm.execution.offload.layer_stream import OffloadedWeights, place_weights
from jdllm.execution.offload.placement import (
    device_weight_bytes,
    host_weight_bytes,
    offloaded_layers,
    streamed_bytes,
)
from jdllm.execution.transformer import forward
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import Params, layer_specs, param_bytes
from jdllm.serving.packing import lay_out
from tests.helpers import Golden

DEVICE = jax.devices()[0]
SEQUENCES = [np.arange(5) + 20, np.arange(210) % 300, np.arange(90) % 100]


def offload(directory: Path, config: ModelConfig, count: int) -> OffloadedWeights:
    place = place_weights(DEVICE, offloaded_layers(config, count))
    order = range(config.num_layers)[::-1]
    return OffloadedWeights(config, *load_by_layer(directory, config, "float32", place, order=order), DEVICE)


WHOLE, CUT = ChunkConfig(), ChunkConfig(ffn=2, query=3)


def slow(*values: object):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "count", "chunks"),
    [
        ("llada", 1, WHOLE),
        slow("llada", 2, CUT),
        slow("dream", 2, WHOLE),
        slow("llada_moe", 1, WHOLE),
        slow("llada_moe", 2, CUT),
        slow("llama", 1, CUT),
    ],
)
def test_hidden_rows_are_those_of_the_whole_model(family: str, count: int, chunks: ChunkConfig):
    directory = Golden(family).directory
    config = config_from_hf(directory)
    tokens, rows, _ = lay_out(SEQUENCES, config)
    expected = np.asarray(forward(load_params(directory, config, "float32"), config, tokens, rows))
    weights, executables = offload(directory, config, count), Executables("cpu")
    assert weights.count == count
    for _ in range(2):  # the first layer of the second run was on its way when the first one ended
        hidden = np.asarray(weights.run(tokens, rows, chunks=chunks, call=executables.call))
        np.testing.assert_allclose(hidden, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("family", ["llada", "llada_moe", "qwen2"])
def test_weights_are_where_they_are_counted(family: str):
    directory = Golden(family).directory
    config = config_from_hf(directory)
    for count in range(1, config.num_layers + 1):
        weights = offload(directory, config, count)
        on_host = sum(leaf.nbytes for leaf in jax.tree.leaves(weights.all)) - weights.device_bytes
        assert on_host == host_weight_bytes(config, "float32", count)
        arriving = device_weight_bytes(config, "float32", count) - weights.device_bytes
        assert arriving == 2 * streamed_bytes(config, "float32", count) / count
        assert ("head" in weights.top) == isinstance(weights.top["embed"], np.ndarray)
    assert device_weight_bytes(config, "float32", 0) == param_bytes(config, "float32")
    assert host_weight_bytes(config, "float32", 0) == 0


@pytest.mark.slow
def test_loading_takes_no_more_of_the_device_than_running(config: ModelConfig):
    away, most = offloaded_layers(config, 1), 0
    place = place_weights(DEVICE, away)
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}

    def placed(number: int | None, weights: Params) -> Params:
        nonlocal most
        kept = place(number, weights)
        del weights
        gc.collect()
        mine = (x for x in jax.live_arrays() if id(x) not in before)
        most = max(most, sum(x.nbytes for x in mine if x.sharding.memory_kind != "pinned_host"))
        return kept

    loaded = load_by_layer(Golden("llada").directory, config, "float32", placed)
    layer = streamed_bytes(config, "float32", 1)
    # A layer on its way to host memory may still be there when it has been copied.
    assert most <= device_weight_bytes(config, "float32", 1) - 2 * layer + layer
    del loaded


@pytest.mark.parametrize(("layers", "count"), [(32, 1), (32, 20), (32, 32), (5, 3)])
def test_layers_in_host_memory_are_spread(layers: int, count: int, config: ModelConfig):
    away = sorted(offloaded_layers(dataclasses.replace(config, num_layers=layers), count))
    assert len(away) == count
    assert away[-1] == layers - 1
    gaps = np.diff([-1, *away])
    assert gaps.max() - gaps.min() <= 1


def test_a_layer_that_the_model_has_not_is_refused(config: ModelConfig):
    with pytest.raises(ValueError, match="no layer 2 of 2"):
        layer_specs(config, 2)


class Recorder:
    """Stands for what copies and computes: notes the order, and how many copies there are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.log: list[tuple[str, int]] = []
        self.most = 0
        self._alive: set[int] = set()
        self._numbers: dict[int, int] = {}
        monkeypatch.setattr(layer_stream, "to_device", self.copy)
        monkeypatch.setattr(layer_stream, "on_host", lambda layer: layer["layers"].away)
        monkeypatch.setattr(jax, "block_until_ready", self.wait)

    def copy(self, layer, device):
        if not isinstance(layer, dict):
            return layer
        copied = Copy(self, layer["layers"].number)
        self.log.append(("copy", copied.number))
        self._alive.add(id(copied))
        self.most = max(self.most, len(self._alive))
        return {"layers": copied}

    def freed(self, copied: "Copy") -> None:
        self._alive.discard(id(copied))

    def compute(self, function, h, layer, rows, **_):
        self.log.append(("compute", layer["layers"].number))
        return h, layer["layers"].number

    def wait(self, computed):
        if computed is not None:
            self.log.append(("wait", computed))


@dataclasses.dataclass(eq=False)
class Layer:
    number: int
    away: bool


class Copy:
    def __init__(self, recorder: Recorder, number: int):
        self.number = number
        self._recorder = recorder

    def __del__(self):
        self._recorder.freed(self)


def test_a_copy_starts_before_the_layer_in_front_is_computed(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
):
    config = dataclasses.replace(config, num_layers=5)
    away = offloaded_layers(config, 3)
    assert sorted(away) == [0, 2, 4]
    recorder = Recorder(monkeypatch)
    layers: list[Params] = [{"layers": Layer(i, i in away)} for i in range(5)]
    weights = OffloadedWeights(config, {"embed": np.zeros((4, 2))}, layers, DEVICE)
    tokens, rows, _ = lay_out([np.arange(3)], config)
    for _ in range(2):
        weights.run(tokens, rows, chunks=ChunkConfig(), call=recorder.compute)
    gc.collect()
    of_a_step = [
        *[("copy", 2), ("compute", 0), ("compute", 1)],
        *[("wait", 0), ("copy", 4), ("compute", 2), ("compute", 3)],
        *[("wait", 2), ("copy", 0), ("compute", 4)],
    ]
    assert recorder.log == [("copy", 0), *of_a_step, ("wait", 4), *of_a_step]
    assert recorder.most == 2
