"""Runs causal models: parts of prompts, and sequences that grow by a token a turn."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdllm.compiling.executables import Program
from jdllm.compiling.over_cards import everywhere
from jdllm.decoding.causal import decode, decodes_in_chain, prefill
from jdllm.decoding.encoded_trace import EncodedTrace, Steps, encoding
from jdllm.decoding.encoded_trace import decode as decoded
from jdllm.decoding.rules import evaluated_apart
from jdllm.decoding.sampling import SamplingParams
from jdllm.pallas.masked_logits import Level
from jdllm.planning.buckets import power_bucket
from jdllm.planning.ladder import MAX_SEGMENTS, CausalLadder, Entry, Sizes, prefill_chunk
from jdllm.serving.background import Background
from jdllm.serving.causal.layered_runner import LayeredRunner
from jdllm.serving.causal.packing import (
    PackedPrompts,
    PackedSequences,
    has_words,
    pack_prompts,
    pack_sequences,
    pages_of,
    pages_read,
    part_of,
    penalised,
    usual_entries,
)
from jdllm.serving.causal.request import CausalRequest, causal_spec
from jdllm.serving.demands import Demand, Kind, Life
from jdllm.serving.launch import Launch, Stored
from jdllm.serving.next_tokens import by_request, spread
from jdllm.serving.on_device import OnDevice
from jdllm.serving.packing import controlled
from jdllm.serving.part_runner import Chosen, Need, Packed, PartRunner
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.request import Request, of_class
from jdllm.serving.spec import RequestSpec

_prefill, _decode = encoding(prefill), encoding(decode)
_LEVELS = (Level.TOP, Level.FILTERED)


class CausalRunner:
    """Prefills and decodes requests of a causal model.

    Arguments:
    - `model`: the model on its device.
    - `ladder`: the sizes of its steps.
    - `layered`: runs requests that the pool has no room for.
    - `background`: compiles sizes that fit better than those that serve now.

    - `chunk`: tokens of a prompt that one part evaluates at most, whole pages.
    """

    def __init__(
        self,
        model: OnDevice,
        ladder: CausalLadder,
        layered: LayeredRunner,
        background: Background,
    ):
        self._params, self._config, self._executables, self._account, self._pool = model
        self._ladder = ladder
        self._layered = layered
        self._parts = PartRunner(model, background)
        kinds = list(itertools.product((False, True), repeat=3))
        self._prefill_sizes = {kind: Sizes(ladder.prefill) for kind in kinds}
        self._decode_sizes = {kind: Sizes(ladder.decode) for kind in kinds}
        self._chained = model.on_each_card(decodes_in_chain)
        self._usual = usual_entries(model.account.rows)
        self.chunk = prefill_chunk(model.account.rows)
        # On the device from the first: executables take numbers of the host in another way.
        self._nothing_left = everywhere(jnp.zeros(MAX_SEGMENTS, jnp.int32), model.params)
        self._left = self._nothing_left

    def life(self, spec: RequestSpec) -> Life:
        """What a request needs at most."""
        if self._layered.takes(spec):
            return self._layered.life(spec)
        return Life(min(len(spec.tokens), self.chunk), pages_of(spec.stored_rows))

    def demand(self, request: Request) -> Demand:
        """What the next step of a request takes."""
        [asked] = of_class(CausalRequest, [request])
        if self._layered.takes(request.spec):
            return self._layered.demand(asked)
        if asked.decodes:
            pages = pages_read(asked, self._config, self._ladder.decode[0].steps)
            return Demand(Kind.DECODE, 1, 1, 1 + len(pages), asked.steps_left)
        part = part_of(asked, self.chunk)
        return Demand(Kind.PREFILL, len(part), int(part.stop == asked.known), pages_of(part.stop))

    def prefill(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack the next part of each prompt; `max_steps` does not matter."""
        asked = of_class(CausalRequest, requests)
        parts = [part_of(request, self.chunk) for request in asked]
        stored, rows = any(part.start > 0 for part in parts), sum(map(len, parts))
        sizes = self._prefill_sizes[stored, penalised(asked), controlled(asked)]
        entries = power_bucket(sum(pages_of(part.stop) for part in parts), self._usual) if stored else None

        def packed(entry: Entry) -> Packed[PackedPrompts]:
            batch = pack_prompts(asked, parts, self._config, self._pool.book, entry, entries)
            return Packed(batch, self._prefill_program(batch, entry))

        chosen = self._parts.choose(sizes, packed, Need(rows, len(asked), len(asked)))
        counts = [int(part.stop == request.known) for request, part in zip(asked, parts, strict=True)]
        stored_rows = [Stored(np.arange(part.stop, part.stop), part.stop) for part in parts]
        return self._launch(chosen, asked, counts, stored_rows)

    def decode(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack up to `max_steps` tokens of each request; one where an answer has a given form, whose grammar
        the host follows."""
        asked = of_class(CausalRequest, requests)
        matched = any(request.matcher is not None for request in asked)
        max_steps = 1 if matched else max_steps
        apart = any(evaluated_apart(request.sampling) for request in asked)
        kind = apart, penalised(asked), controlled(asked)
        sizes, level = self._decode_sizes[kind], _LEVELS[kind[0]]

        def packed(entry: Entry) -> Packed[PackedSequences]:
            needed = sum(1 + len(pages_read(request, self._config, entry.steps)) for request in asked)
            entries = power_bucket(needed, self._least_entries(entry))
            batch = self._sequences(asked, self._pool.book, entry, entries)
            return Packed(batch, self._decode_program(batch, entry, level, min(max_steps, entry.steps)))

        chosen = self._parts.choose(sizes, packed, Need(len(asked), len(asked), len(asked), max_steps))
        steps = min(max_steps, chosen.entry.steps)
        counts = [min(steps, request.steps_left) for request in asked]
        sequences, *others, _ = chosen.arguments[1:]

        def run() -> EncodedTrace:
            # A part that failed has left nothing: nobody waits for it, and nobody should find its failure.
            waited = any(request.awaited is not None for request in asked)
            given = sequences._replace(left=self._left) if waited else sequences
            ran = self._pool.run(chosen.executable, self._params, given, *others, writes=True)
            trace, self._left = ran
            return trace

        launch = self._launch(chosen, asked, counts, [None] * len(asked))._replace(run=run, steps=steps)
        # The host packs what is known of a sequence for penalties, for words of several tokens and grammars.
        known = penalised(asked) or has_words(chosen.batch.sequences.segments) or matched
        return launch if known else launch._replace(left_at=np.argsort(chosen.batch.order).tolist())

    def _launch(
        self,
        chosen: Chosen[PackedPrompts] | Chosen[PackedSequences],
        asked: Sequence[CausalRequest],
        counts: Sequence[int],
        stored: Sequence[Stored | None],
    ) -> Launch:
        """A part of which each request gets up to so many tokens."""

        def take(found: EncodedTrace) -> Steps:
            return spread(by_request(decoded(found), chosen.batch.order, len(asked)), counts)

        positions = [np.arange(r.known, r.known + count) for r, count in zip(asked, counts, strict=True)]
        run = functools.partial(self._pool.run, chosen.executable, *chosen.arguments[:-1], writes=True)
        return Launch(run, positions, stored, take, chosen.entry.rows)

    def programs(self) -> Iterator[Program]:
        """What the ladder needs compiled."""
        request = CausalRequest(causal_spec([0], SamplingParams(gen_length=1), self._config), -1)
        pool = self._pool.book.allocate(request.id, 2)
        for entry in self._ladder.prefill:
            for entries in (None, self._usual):
                packed = pack_prompts([request], [range(1)], self._config, pool, entry, entries)
                yield self._prefill_program(packed, entry)
        for entry in self._ladder.decode:
            packed = self._sequences([request], pool, entry, self._least_entries(entry))
            for level in _LEVELS:
                yield self._decode_program(packed, entry, level, 1)

    def warm(self) -> None:
        """Compile every entry of the ladder; entries with penalties or controls are compiled when first
        needed."""
        self._executables.prepare(list(self.programs()))
        for chosen in (False, True):
            self._prefill_sizes[chosen, False, False].compiled.update(self._ladder.prefill)
            self._decode_sizes[chosen, False, False].compiled.update(self._ladder.decode)

    def _sequences(
        self, asked: Sequence[CausalRequest], pool: PageBook, entry: Entry, entries: int
    ) -> PackedSequences:
        """As `pack_sequences` packs them; what parts leave for others stays on the device."""
        packed = pack_sequences(asked, self._config, pool, entry, entries)
        return packed._replace(sequences=packed.sequences._replace(left=self._nothing_left))

    def _least_entries(self, entry: Entry) -> int:
        """Entries of the page table of a decode, at least; the rows of a window are gathered."""
        if self._config.sliding_window is None:
            return self._pool.entries(entry.segments)
        return entry.segments * (pages_of(self._config.sliding_window + entry.steps) + 2)

    def _prefill_program(self, batch: PackedPrompts, entry: Entry) -> Program:
        args = self._params, *batch.arguments, self._pool.abstract
        static, name = self._static(_LEVELS[-1]), f"prefill of {entry.rows} rows"
        return Program(_prefill, args, static, donate=("pool",), name=name)

    def _decode_program(self, batch: PackedSequences, entry: Entry, level: Level, steps: int) -> Program:
        args = self._params, *batch.arguments, np.int32(steps), self._pool.abstract
        static, chained = self._static(level), self._chained(entry.segments)
        name = f"decode of {entry.rows} rows"
        return Program(_decode, args, static, donate=("pool",), chained=chained, name=name)

    def _static(self, level: Level) -> dict[str, Any]:
        return {"config": self._config, "level": level}
