"""What all declarations of requests have in common: null, fields without effect, names that nobody knows."""

from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)
from pydantic_core import PydanticCustomError

from jdllm.arguments import resembling

UNKNOWN_FIELD = "unknown_field"
"""The type of a validation error for a name that resembles a field's; its context has `name` and `meant`. It
is also the code of the answer that tells of a name that no field has."""

_MOST_COMPARED = 16
"""Unknown names that are compared with the known ones, which takes a millisecond or two each."""

PassedOver = Annotated[Any, Field(description="Accepted, without effect.")]


class Fields(BaseModel):
    """A declaration in which null is as good as nothing, and names that it does not have are passed over.

    A name that resembles a field's is refused: who misspells one means it.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    _unknown: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _take(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        given = {name: value for name, value in data.items() if value is not None}
        unknown = [name for name in given if name not in cls.model_fields]
        for name in unknown[:_MOST_COMPARED]:
            meant = resembling(name, cls.model_fields)
            if meant is not None:
                raise PydanticCustomError(
                    UNKNOWN_FIELD, "did you mean {meant}?", {"name": name, "meant": meant}
                )
        made = handler(given)
        made._unknown = unknown
        return made

    def ignored(self) -> list[str]:
        """The names that were passed over; names of inner declarations have their paths."""
        found = list(self._unknown)
        for name in self.model_fields_set:
            value = getattr(self, name)
            several = isinstance(value, list)
            for at, one in enumerate(value if several else [value]):
                if isinstance(one, Fields):
                    place = f"{name}[{at}]" if several else name
                    found += [f"{place}.{inner}" for inner in one.ignored()]
        return found


def only(*values: object, why: str) -> AfterValidator:
    """Accept these values of a field that cannot have others here, and say why."""

    def check(value: object) -> object:
        if value is not None and value not in values:
            expected = " or ".join(map(repr, values))
            raise PydanticCustomError(
                "unsupported", "expected {expected}: {why}", {"expected": expected, "why": why}
            )
        return value

    return AfterValidator(check)


def nothing(why: str) -> AfterValidator:
    """Accept a list or an object that is empty, and say why."""

    def check(value: object) -> object:
        if value:
            raise PydanticCustomError("unsupported", "expected nothing: {why}", {"why": why})
        return value

    return AfterValidator(check)
