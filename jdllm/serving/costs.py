"""What requests take, as the scheduler counts it."""

from typing import Protocol

from jdllm.decoding.cache_policies import Phase
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.planning.buckets import row_bucket
from jdllm.serving.denoise.cached_packing import reuse_demand
from jdllm.serving.long.preparation import Preparation
from jdllm.serving.long.request import LongRequest
from jdllm.serving.packing import demand
from jdllm.serving.request import Request
from jdllm.serving.scheduler import Demand, Kind, Life
from jdllm.serving.spec import RequestSpec


class Costs(Protocol):
    """Counts of one kind of model.

    - `life`: what a request needs at most.
    - `demand`: what its next step takes.
    """

    def life(self, spec: RequestSpec) -> Life: ...

    def demand(self, request: Request) -> Demand: ...


class DenoisingCosts:
    """Those of a model that denoises.

    Arguments:
    - `preparation`: of requests over long contexts.
    - `rows`: packed rows of a step of the ladder. Beyond, a request takes those that are compiled for it.
    """

    def __init__(self, preparation: Preparation, rows: int):
        self._preparation = preparation
        self._rows = rows

    def life(self, spec: RequestSpec) -> Life:
        pages = -(-spec.stored_rows // PAGE_ROWS) if spec.cached else 0
        return Life(spec.rows if spec.rows <= self._rows else row_bucket(spec.rows), pages)

    def demand(self, request: Request) -> Demand:
        if isinstance(request, LongRequest) and (stage := self._preparation.next(request)) is not None:
            return Demand(Kind.PREPARE, stage.rows, 0, 0)
        if request.cached and request.phase is Phase.REUSE:
            return Demand(Kind.REUSE, *reuse_demand(request, PAGE_ROWS))
        kind = Kind.REFRESH if request.cached else Kind.ADAPTIVE if request.adaptive else Kind.FULL
        return Demand(kind, *demand(request), 0)
