"""Which reader reads the weights of which method."""

from collections.abc import Callable

from jdllm.checkpoints.index import Index
from jdllm.checkpoints.quantised import bitsandbytes, compressed_tensors, gptq, torchao
from jdllm.errors import CheckpointError
from jdllm.models.quantization import Method, Quantization


def _native_alone(*_: object) -> Index:
    raise CheckpointError(
        "config.json has quantization_config (quant_method jdllm), which is for native checkpoints, and these"
        " weights are in safetensors: give the directory that jdllm convert made"
    )


_READERS: dict[Method, Callable[[Index, Quantization], Index]] = {
    "compressed-tensors": compressed_tensors.dequantised,
    "fp8": compressed_tensors.dequantised,
    "gptq": gptq.dequantised,
    "awq": gptq.dequantised,
    "bitsandbytes": bitsandbytes.dequantised,
    "torchao": torchao.dequantised,
    "jdllm": _native_alone,
}


def dequantised(index: Index, quantization: Quantization) -> Index:
    """The tensors of a checkpoint with a matrix, a `PackedTensor`, for each quantised one.

    Arguments:
    - `index`: what is stored.
    - `quantization`: of its `config.json`.

    Raises `CheckpointError` for a matrix that is stored in another way than the configuration says.
    """
    return _READERS[quantization.method](index, quantization)
