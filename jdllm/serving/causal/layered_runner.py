"""Runs causal requests whose keys do not fit the KV pool: one at a time, layer by layer."""

import jax
import numpy as np

from jdllm.byte_sizes import format_bytes
from jdllm.compiling.executables import temp_bytes
from jdllm.decoding.layered import LayeredSequence
from jdllm.errors import NoRoomError
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.leaf import dtypes_of
from jdllm.planning.budget import MemoryBudgetError
from jdllm.planning.ladder import Entry
from jdllm.planning.layered import Layered, LayeredPlan, longest_layered, missing, plan_layered
from jdllm.serving.causal.packing import next_of
from jdllm.serving.causal.request import CausalRequest
from jdllm.serving.demands import Demand, Kind, Life
from jdllm.serving.launch import Launch, Stored
from jdllm.serving.on_device import OnDevice
from jdllm.serving.request import Request, of_class
from jdllm.serving.spec import RequestSpec

_ROWS = 1 << 19
"""Rows times layers of one part: about a second of an 8B model on an H200, some more of long prompts."""

ONE = Entry(1, 1, 1, 1)


class LayeredRunner:
    """Runs requests whose keys take more than the KV pool, in the room of the pool and in host memory.

    Arguments:
    - `model`: the model on its device. Its KV pool is freed before anything of a request runs.

    - `model`: what plans of its requests need; `None` where nothing is planned.
    """

    def __init__(self, model: OnDevice):
        self._params, self._config, self._executables, account, self._pool = model
        self.model = Layered.of_account(model.config, dtypes_of(model.params).activations.name, account)
        self._pages = model.pool.pages
        self._running: dict[int, LayeredSequence] = {}

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that has room, 0 where nothing is planned."""
        return 0 if self.model is None else longest_layered(self.model, 1)

    def takes(self, spec: RequestSpec) -> bool:
        """Whether a request needs more than the pool, where there is a plan for such."""
        return self.model is not None and spec.stored_rows > self._pages * PAGE_ROWS

    def life(self, spec: RequestSpec) -> Life:
        """What a request needs at most."""
        return Life(len(spec.tokens), 0, holds=True)

    def demand(self, request: CausalRequest) -> Demand:
        """What the next step of a request takes."""
        return Demand(Kind.LAYERED, 1 if request.decodes else request.known, 1, 0)

    def check(self, spec: RequestSpec) -> None:
        """Raise `NoRoomError` for a request that has no room on the device and in host memory."""
        if self.model is None or not self.takes(spec) or self._plan(spec) is not None:
            return
        prompt, generated = len(spec.prompt), len(spec.tokens) - len(spec.prompt)
        longest = max(self._pages * PAGE_ROWS - generated, longest_layered(self.model, generated))
        budget = self.model.budget
        raise NoRoomError(
            f"a prompt of {prompt} tokens with {generated} behind it needs"
            f" {missing(self.model, prompt, generated)}; memory is {format_bytes(budget.device)} and"
            f" host_memory {format_bytes(budget.host)}: the longest prompt that fits is {longest} tokens"
        )

    def launch(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack some layers of a prompt, or one token, of one request; `max_steps` does not matter."""
        (request,) = of_class(CausalRequest, requests)
        if request.id not in self._running:
            self._running[request.id] = self._begin(request)
        sequence = self._running[request.id]
        chosen = next_of(request, self._config, ONE)
        if request.decodes:
            token = int(request.tokens[request.known - 1])
            run = lambda: sequence.next_token(token, *chosen)  # noqa: E731
            return Launch(run, [np.array([request.known])], [None])
        layers = max(1, _ROWS // request.known)
        if sequence.read + layers < self._config.num_layers:
            return Launch(lambda: self._read(sequence, layers), [np.zeros(0, np.int64)], [None], lambda _: 0)

        def end():
            self._read(sequence, self._config.num_layers)
            return sequence.first_token(*chosen)

        stored = Stored(np.arange(0), request.known)
        return Launch(end, [np.array([request.known])], [stored])

    @property
    def held(self) -> int:
        """For how many requests something is held."""
        return len(self._running)

    def forget(self, request: int) -> None:
        """Free what a request holds: it has ended, or begins again."""
        self._running.pop(request, None)

    def clear(self) -> None:
        """Nothing: what a request holds lies beside the pool, and no failed part of others damages it."""

    def _read(self, sequence: LayeredSequence, layers: int) -> jax.Array:
        if not sequence.read:
            self._pool.free()
        return sequence.prefill(layers)

    def _begin(self, request: CausalRequest) -> LayeredSequence:
        plan = self._plan(request.spec)
        assert plan is not None
        prompt = request.tokens[: request.known]
        sequence = LayeredSequence(self._params, self._config, plan.layering, prompt, self._executables.call)
        compiled = sequence.compile(self._executables.compile)
        assert self.model is not None
        needed = plan.prompt_bytes + max(0, max(map(temp_bytes, compiled)) - plan.temporaries)
        if needed > (device := self.model.budget.device):
            what = f"a prompt of {request.known} tokens, layer by layer,"
            raise MemoryBudgetError(what, needed, device, self._pages * PAGE_ROWS, "prompt in the KV pool")
        return sequence

    def _plan(self, spec: RequestSpec) -> LayeredPlan | None:
        assert self.model is not None
        return plan_layered(self.model, len(spec.prompt), len(spec.tokens) - len(spec.prompt))
