"""Requests that leave to the engine how they generate."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jdllm.serving.spec import RequestSpec


class Way(NamedTuple):
    """One way in which a request may generate.

    - `name`: of `generation_mode`.
    - `spec`: what the request asks then.
    - `length`: positions of a block or of a draft.
    - `rows`: that an evaluation of the request has, on average.
    - `most`: tokens that an evaluation commits to the request at most, on average.
    """

    name: str
    spec: RequestSpec
    length: int
    rows: float
    most: float


@dataclasses.dataclass(frozen=True, eq=False)
class AutoSpec(RequestSpec):
    """What a request asks that leaves to the engine how it generates. Fields are those of its longest way.

    - `ways`: in which it may generate. The first of equals is chosen.
    """

    ways: tuple[Way, ...]

    @property
    def in_order(self) -> bool:
        return all(way.spec.in_order for way in self.ways)

    @property
    def positions(self) -> int:
        return max(way.spec.positions for way in self.ways)


def auto_spec(specs: Mapping[str, RequestSpec], length: int, copies: int) -> AutoSpec:
    """A request of a block model that may generate in several ways.

    Arguments:
    - `specs`: what it asks in each way, by the names of `generation_mode`: "autoregressive",
      "self_speculation", perhaps "diffusion".
    - `length`: positions of a block and of a draft.
    - `copies`: rows for each position of a draft where it is verified, and for each token that is generated
      alone.
    """
    expected = {
        "autoregressive": (1, copies, 1.0),
        # One evaluation drafts, another one verifies.
        "self_speculation": (length, length * (1 + copies) / 2, length / 2),
        "diffusion": (length, length, length),
    }
    longest = max(specs.values(), key=lambda spec: len(spec.tokens))
    fields = {field.name: getattr(longest, field.name) for field in dataclasses.fields(RequestSpec)}
    return AutoSpec(**fields, ways=tuple(Way(name, spec, *expected[name]) for name, spec in specs.items()))
