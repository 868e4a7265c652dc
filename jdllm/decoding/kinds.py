"""Bounds that parameters of requests share, as types for pydantic."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, PydanticKnownError, core_schema

LONGEST = 2**24
"""Positions that a request can ask for: rotary positions are whole numbers in f32 up to here."""

LARGEST = 1e6
"""The largest scale: far beyond use, and far from overflow in f32."""

Length = Annotated[int, Field(ge=1, le=LONGEST)]
Step = Annotated[int, Field(ge=0, le=LONGEST)]
Scale = Annotated[float, Field(ge=0, le=LARGEST)]
Real = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]

POST_STEPS = 16
"""Steps of a block behind its last mask, unless a request says otherwise: as published for LLaDA2.1."""

PostSteps = Annotated[int, Field(ge=0, le=1024)]


def odd(value: int) -> int:
    """Refuse even numbers."""
    if value % 2 == 0:
        raise PydanticCustomError("expected", "an odd positive integer")
    return value


@dataclasses.dataclass(frozen=True)
class OneOf:
    """One of the names that are known at the moment: names that are registered later are allowed, too.

    - `names`: returns the names, in the order in which they are listed.
    """

    names: Callable[[], Sequence[str]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self.names()), "type": "string"}

    def _check(self, value: object) -> object:
        names = list(self.names())
        if not isinstance(value, str) or value not in names:
            *others, last = map(repr, names)
            expected = f"{', '.join(others)} or {last}" if others else last
            raise PydanticKnownError("literal_error", {"expected": expected})
        return value
