"""What a batch says of its rules: which there are, and their parameters."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import jax

from jdllm.decoding.transfer.rule import Acceptance


@jax.tree_util.register_pytree_node_class
class OfRules(Mapping[str, Any]):
    """The options of all rules by name, one entry per segment, and the rules that the program is made of.

    The arrays are leaves, in the order of registration. The rules are part of the tree's structure, so that
    batches of different sets of rules have different executables.

    - `numbered`: each rule's number in `SegmentParams.rule`, and the rule.
    """

    def __init__(self, values: Mapping[str, Any], numbered: Iterable[tuple[int, Acceptance]]):
        self._values = dict(values)
        self.numbered = tuple(numbered)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(self._values.values()), (tuple(self._values), self.numbered)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: Iterable[Any]) -> Self:
        names, numbered = static
        return cls(dict(zip(names, leaves, strict=True)), numbered)
