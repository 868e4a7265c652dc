"""Which reader reads the weights of which method."""

from collections.abc import Callable

from jdllm.checkpoints.index import Index
from jdllm.checkpoints.quantised import bitsandbytes, compressed_tensors, gptq, torchao
from jdllm.models.quantization import Method, Quantization

_READERS: dict[Method, Callable[[Index, Quantization], Index]] = {
    "compressed-tensors": compressed_tensors.dequantised,
    "fp8": compressed_tensors.dequantised,
    "gptq": gptq.dequantised,
    "awq": gptq.dequantised,
    "bitsandbytes": bitsandbytes.dequantised,
    "torchao": torchao.dequantised,
}


def dequantised(index: Index, quantization: Quantization) -> Index:
    """The tensors of a checkpoint with a matrix, a `PackedTensor`, for each quantised one.

    Arguments:
    - `index`: what is stored.
    - `quantization`: of its `config.json`.

    Raises `CheckpointError` for a matrix that is stored in another way than the configuration says.
    """
    return _READERS[quantization.method](index, quantization)
