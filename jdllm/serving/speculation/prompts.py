"""Stores the prompts of requests whose first token is drafted too: nothing is chosen behind a prompt."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jdllm.compiling.executables import Program
from jdllm.decoding.blocks import store_blocks
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.planning.buckets import power_bucket
from jdllm.planning.ladder import CausalLadder, Entry, Sizes, prefill_chunk
from jdllm.serving.background import Background
from jdllm.serving.causal.packing import PackedPrompts, pack_prompts, pages_of, part_of, usual_entries
from jdllm.serving.causal.request import CausalRequest, causal_spec
from jdllm.serving.demands import Demand, Kind, Life
from jdllm.serving.launch import Launch, Stored
from jdllm.serving.on_device import OnDevice
from jdllm.serving.part_runner import Need, Packed, PartRunner
from jdllm.serving.request import Request, of_class
from jdllm.serving.spec import RequestSpec


class PromptStore:
    """Stores parts of prompts as a causal model does.

    Arguments:
    - `model`: the model on its device.
    - `causal`: the configuration of the model as a causal one.
    - `ladder`: the sizes of parts.
    - `background`: compiles sizes that fit better than those that serve now.
    """

    def __init__(self, model: OnDevice, causal: ModelConfig, ladder: CausalLadder, background: Background):
        self._params, _, self._executables, account, self._pool = model
        self._causal, self._entries = causal, ladder.prefill
        self._parts = PartRunner(model, background)
        self._sizes = {stored: Sizes(ladder.prefill) for stored in (False, True)}
        self._usual, self._chunk = usual_entries(account.rows), prefill_chunk(account.rows)

    def life(self, spec: RequestSpec) -> Life:
        """What a request needs at most."""
        return Life(min(len(spec.tokens), self._chunk), pages_of(spec.stored_rows))

    def demand(self, request: Request) -> Demand:
        """What the next part of a prompt takes."""
        [asked] = of_class(CausalRequest, [request])
        part = part_of(asked, self._chunk)
        return Demand(Kind.STORE, len(part), 0, pages_of(part.stop))

    def launch(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack the next part of each prompt; `max_steps` does not matter."""
        asked = of_class(CausalRequest, requests)
        parts = [part_of(request, self._chunk) for request in asked]
        stored = any(part.start > 0 for part in parts)
        entries = power_bucket(sum(pages_of(part.stop) for part in parts), self._usual) if stored else None

        def packed(entry: Entry) -> Packed[PackedPrompts]:
            batch = pack_prompts(asked, parts, self._causal, self._pool.book, entry, entries)
            return Packed(batch, self._program(batch, entry))

        need = Need(sum(map(len, parts)), 0, len(asked))
        chosen = self._parts.choose(self._sizes[stored], packed, need)

        def run() -> Any:
            return self._pool.run(chosen.executable, *chosen.arguments[:-1], writes=True)

        nothing = [np.arange(0)] * len(asked)
        left = [Stored(np.arange(0), part.stop) for part in parts]
        return Launch(run, nothing, left, lambda _: 1, chosen.entry.rows)

    def programs(self) -> Iterator[Program]:
        """What the ladder needs compiled."""
        request = CausalRequest(causal_spec([0], SamplingParams(gen_length=1), self._causal), -1)
        pool = self._pool.book.allocate(request.id, 2)
        for entry in self._entries:
            for entries in (None, self._usual):
                packed = pack_prompts([request], [range(1)], self._causal, pool, entry, entries)
                yield self._program(packed, entry)

    def warm(self) -> None:
        """Compile every entry of the ladder."""
        self._executables.prepare(list(self.programs()))
        for sizes in self._sizes.values():
            sizes.compiled.update(self._entries)

    def _program(self, packed: PackedPrompts, entry: Entry) -> Program:
        rows = packed.batch.tokens, packed.batch.rows, packed.storage, packed.keys
        name, static = f"storing of {entry.rows} rows", {"config": self._causal}
        arguments = self._params, *rows, self._pool.abstract
        return Program(store_blocks, arguments, static, donate=("pool",), name=name)
