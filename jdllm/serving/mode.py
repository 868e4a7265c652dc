"""A way of generating, and what an engine is made of for it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jdllm.checkpoints.token_text import Decode
from jdllm.chunks import ChunkConfig
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.adapter import NO_DRAFTING, Drafting
from jdllm.models.config import ModelConfig
from jdllm.planning.ladder import Entry
from jdllm.serving.adaptive.verifier import Verifier
from jdllm.serving.auto_spec import AutoSpec
from jdllm.serving.background import Background
from jdllm.serving.demands import COMPANY_ROWS, Demand, Held, Kind, Life
from jdllm.serving.launch import Compiled, Launcher
from jdllm.serving.on_device import OnDevice
from jdllm.serving.request import Request
from jdllm.serving.spec import RequestSpec
from jdllm.serving.ways import Ways

Classes = Mapping[type[RequestSpec], type[Request]]


class Extras(NamedTuple):
    """What an engine may have beside its model.

    - `chunks`: fixed chunk counts of full steps instead of planned ones.
    - `max_num_logits`: head rows whose logits may exist at a time.
    - `verifier`: the model that checks the drafts of adaptive parallel decoding.
    - `company_rows`: of `Limits`; where clients share the engine, a refresh of more than `CUT` times as many
      is cut.
    - `drafting`: how a model drafts that verifies its own drafts.
    """

    chunks: ChunkConfig | None = None
    max_num_logits: int | None = None
    verifier: Verifier | None = None
    company_rows: int = COMPANY_ROWS
    drafting: Drafting = NO_DRAFTING


class Holder(Protocol):
    """Holds something for requests beside the KV pool.

    - `held`: for how many requests it holds something.
    - `forget`: give up everything held for a request, which has ended or begins again.
    - `clear`: give up everything that a failed part may have damaged, for all requests.
    """

    @property
    def held(self) -> int: ...

    def forget(self, request: int) -> None: ...

    def clear(self) -> None: ...


class Costs(Protocol):
    """Counts what requests take.

    - `life`: what a request needs at most.
    - `demand`: what its next step takes.
    """

    def life(self, spec: RequestSpec) -> Life: ...

    def demand(self, request: Request) -> Demand: ...


@dataclasses.dataclass(frozen=True)
class CostsOf:
    """Counts what requests of several classes take: `Costs`.

    - `by_spec`: counts for each class of what may be asked for.
    """

    by_spec: Mapping[type[RequestSpec], Costs]

    def life(self, spec: RequestSpec) -> Life:
        if isinstance(spec, AutoSpec):
            lives = [self.life(way.spec) for way in spec.ways]
            return Life(max(life.rows for life in lives), max(life.pages for life in lives))
        return self.by_spec[type(spec)].life(spec)

    def demand(self, request: Request) -> Demand:
        return self.by_spec[type(request.spec)].demand(request)


@dataclasses.dataclass(frozen=True)
class EngineParts:
    """What an engine is made of.

    - `launchers`: for each kind of part the function that packs it.
    - `costs`: counts what requests take.
    - `check`: raises `JdllmError` for a request that this engine cannot serve.
    - `compiled`: what a warm-up compiles; `compiled_shared`: what it compiles too where clients share the
      engine.
    - `holders`: what holds something for requests beside the pool.
    - `longest_served`: tokens of the longest sequence that has room.
    - `head_rows`: head rows that requests share in one part.
    - `tiles`: tiles of the largest step that reads the pool.
    - `reuse_rows`: rows of the largest step of a block that reads the pool; 0 where no kind of step does.
    - `filled`: the sizes of kinds whose requests are worth waiting for.
    - `longest`: rows of the longest request that is admitted.
    - `beside_pool`: rows up to which a step leaves the pool where it is.
    - `whole_rows`: rows of whole sequences that share one part.
    - `held`: what stays on the device between two parts of a request, `None` where nothing does.
    - `set_aside`: takes this off the device until the next part; called in the thread of the parts.
    - `ways`: chooses how requests generate that leave this to the engine; `None` where none do.
    """

    launchers: Mapping[Kind, Launcher]
    costs: Costs
    check: Callable[[RequestSpec], None]
    compiled: Sequence[Compiled]
    holders: Sequence[Holder]
    longest_served: int
    head_rows: int
    tiles: int
    reuse_rows: int
    filled: Mapping[Kind, Sequence[Entry]]
    longest: int
    beside_pool: int
    whole_rows: int
    compiled_shared: Sequence[Compiled] = ()
    held: Callable[[], Held | None] = lambda: None
    set_aside: Callable[[], None] = lambda: None
    ways: Ways | None = None

    def forget(self, request: int) -> None:
        """Give up everything that is held for a request."""
        for holder in self.holders:
            holder.forget(request)

    def clear(self) -> None:
        """Give up everything that a failed part may have damaged."""
        for holder in self.holders:
            holder.clear()

    def with_room[T](self, function: Callable[[], T]) -> T:
        """`function()`, which may take all the memory that a step has; in the thread of the parts."""
        self.set_aside()
        return function()

    def warmed(self, *, shared: bool) -> list[Compiled]:
        """What a warm-up compiles.

        Arguments:
        - `shared`: whether clients share the engine.
        """
        return [*self.compiled, *(self.compiled_shared if shared else ())]


class Mode(Protocol):
    """A way of generating.

    - `requests`: the class of a request's state, for each class of what may be asked for.
    """

    requests: Classes

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raise `RequestError` for a parameter that models of this mode have no use for."""
        ...

    def spec(
        self,
        prompt: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        config: ModelConfig,
        decode: Decode | None = None,
        bos_id: int | None = None,
    ) -> RequestSpec:
        """A request that generates a text behind a prompt.

        Arguments:
        - `prompt`: int32 ids `[length]`.
        - `decode`: ids to text, for stop strings.
        - `bos_id`: id of the tokenizer that begins a text.

        Raises `RequestError` for what can never run.
        """
        ...

    def infilling(
        self, tokens: Sequence[int] | np.ndarray, sampling: SamplingParams, config: ModelConfig
    ) -> RequestSpec:
        """A request that fills the masks inside a sequence.

        Arguments:
        - `tokens`: int32 ids `[length]`, with masks.

        Raises `RequestError` for what can never run.
        """
        ...

    def parts(self, model: OnDevice, background: Background, extras: Extras) -> EngineParts:
        """What an engine is made of.

        Arguments:
        - `model`: the model on its device.
        - `background`: compiles sizes while others serve.
        - `extras`: what the engine has beside the model.

        Raises `ConfigError` for extras that the mode has no use for, and `DoesNotFitError`.
        """
        ...
