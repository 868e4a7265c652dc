"""The kernels of a step that runs its layers as a chain, from the text of what is compiled."""

import re
from typing import NamedTuple


class Chain(NamedTuple):
    """How a step runs.

    - `of_layers`: kernels of the layers.
    - `between`: what runs between the first of them and the last.
    - `beside`: how many kernels run before and after.
    - `constants`: what kernels of the layers take that lies beside their code, where the driver may put it at
      addresses that they refuse.
    """

    of_layers: int
    between: list[str]
    beside: int
    constants: set[str]


def spills_of(printed: str) -> set[tuple[str, str]]:
    """Bytes of stack frames and of spilled registers, as far as the assembler was asked to print them."""
    return set(re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", printed))


def chain_of(text: str) -> Chain:
    """The chain in the one computation that has kernels of layers."""
    (body,) = (part for part in text.split("\n\n") if re.search(r"jit\(layer\)/\S*/add_norm/", part))
    kernels = [line for line in body.splitlines() if re.search(r" (fusion|copy|while|custom-call)\(", line)]
    of_layers = ["(layer)" in line and "mosaic_gpu" in line for line in kernels]
    begin, end = of_layers.index(True), len(kernels) - of_layers[::-1].index(True)
    between = [line for line, own in zip(kernels[begin:end], of_layers[begin:end], strict=True) if not own]
    taken = {name for line, own in zip(kernels, of_layers, strict=True) if own for name in _operands(line)}
    constants = taken & set(re.findall(r"%(\S+) = \S+ constant\(", body))
    return Chain(sum(of_layers), between, len(kernels) - sum(of_layers) - len(between), constants)


def _operands(line: str) -> list[str]:
    """Names of what a custom call takes."""
    _, _, taken = line.partition(" custom-call(")
    return re.findall(r"%([\w.-]+)", taken.partition(")")[0])
