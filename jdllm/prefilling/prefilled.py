"""How a long context was prepared."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(eq=False)
class Prefilled:
    """How a long context was prepared.

    - `selected`: the chunks that were kept, by their number in the document, rising.
    - `scores`: f32, of all chunks.
    - `kept`: for each selected chunk the tokens that were kept, rising; by layer and head where these differ.
    - `spans`: tokens `[start, stop)` of the context that each selected chunk was cut from.
    - `draft`: the drafted ids; masks where none was drafted.
    - `seconds`: of each stage.
    - `cached_chunks`: chunks whose keys were stored by an earlier request.
    """

    selected: list[int] = dataclasses.field(default_factory=list)
    scores: list[float] = dataclasses.field(default_factory=list)
    kept: list[np.ndarray] = dataclasses.field(default_factory=list)
    spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    draft: list[int] = dataclasses.field(default_factory=list)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    cached_chunks: int = 0

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain Python values, ready for JSON."""
        return {**vars(self), "kept": [kept.tolist() for kept in self.kept]}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Prefilled):
            return NotImplemented
        mine, theirs = ({**x.to_dict(), "seconds": None, "cached_chunks": None} for x in (self, other))
        return mine == theirs
