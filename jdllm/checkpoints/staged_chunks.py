"""The chunks of a native checkpoint while they are written, and which of them are complete."""

import dataclasses
from collections.abc import Iterable

from jdllm.checkpoints import native
from jdllm.checkpoints.index import StoredTensor
from jdllm.checkpoints.native import NativeTensor
from jdllm.checkpoints.staging import Stage, synced


class StagedChunks:
    """The chunks of a checkpoint that is being made.

    Arguments:
    - `stage`: where they are collected.
    - `tensors`: all tensors of the checkpoint, without checksums.
    """

    def __init__(self, stage: Stage, tensors: Iterable[NativeTensor]):
        self._stage = stage
        self._tensors = {tensor.name: tensor for tensor in tensors}

    def has(self, name: str) -> bool:
        """Tells whether a tensor is complete, in this run or one before."""
        return self._stage.has(name)

    def stored(self, name: str) -> StoredTensor:
        """A complete tensor."""
        return self._tensors[name].stored(self._stage.directory)

    def write(self, name: str, values: StoredTensor) -> None:
        """Write a tensor, unless it is complete.

        Arguments:
        - `name`: of the tensor.
        - `values`: where its values are; they are cast to the type of the tensor.
        """
        if self.has(name):
            return
        tensor = self._tensors[name]
        file = self._stage.directory / tensor.chunk
        file.parent.mkdir(exist_ok=True)
        with synced(file) as out:
            checksum = native.stream(values, out.write, tensor.dtype)
        self._stage.record(name, tensor.chunk, checksum)

    def described(self) -> list[NativeTensor]:
        """All tensors, which are complete, with their checksums."""
        return [dataclasses.replace(x, sha256=self._stage.value(x.name)) for x in self._tensors.values()]
