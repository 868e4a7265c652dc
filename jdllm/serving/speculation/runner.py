"""Runs requests whose model verifies its own drafts."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jdllm.compiling.executables import Program
from jdllm.decoding.encoded_trace import LISTED, EncodedTrace, Steps, encoding
from jdllm.decoding.encoded_trace import decode as decoded
from jdllm.decoding.rules import head_level
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.speculation import speculate
from jdllm.models.adapter import DraftAdapter
from jdllm.models.config import ModelConfig
from jdllm.pallas.masked_logits import Level
from jdllm.planning.buckets import power_bucket
from jdllm.planning.ladder import TILE_ROWS, Entry, Ladder, Sizes, prefill_chunk
from jdllm.serving.background import Background
from jdllm.serving.causal.packing import pages_of
from jdllm.serving.demands import Demand, Kind, Life
from jdllm.serving.launch import Launch
from jdllm.serving.mode import Costs
from jdllm.serving.on_device import OnDevice
from jdllm.serving.packing import controlled
from jdllm.serving.part_runner import Need, Packed, PartRunner
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.request import Request, of_class
from jdllm.serving.spec import RequestSpec, mask_id_of
from jdllm.serving.speculation.packing import PackedDrafts, block_of, draft_needs, pack_drafts
from jdllm.serving.speculation.request import SpeculativeRequest, speculative_spec

_speculate = encoding(speculate)
_LEVELS = (Level.TOP, Level.FILTERED)


class SpeculativeRunner:
    """Drafts, verifies and stores blocks.

    Arguments:
    - `model`: the model on its device.
    - `adapter`: with which the model drafts, `None` for the model alone.
    - `causal`: the configuration of the model as a causal one.
    - `prompts`: counts what prompts take.
    - `ladder`: the sizes of its steps that reuse are those of drafts.
    - `background`: compiles sizes that fit better than those that serve now.
    """

    def __init__(
        self,
        model: OnDevice,
        adapter: DraftAdapter | None,
        causal: ModelConfig,
        prompts: Costs,
        ladder: Ladder,
        background: Background,
    ):
        self._params, self._config, self._executables, self._account, self._pool = model
        self._adapter, self._causal, self._prompts = adapter, causal, prompts
        self._chunk = prefill_chunk(model.account.rows)
        self._parts = PartRunner(model, background)
        self._entries = {Level.TOP: ladder.reuse, Level.FILTERED: ladder.ranked}
        self._sizes = {
            (level, controls): Sizes(entries)
            for level, entries in self._entries.items()
            for controls in (False, True)
        }

    def life(self, spec: RequestSpec) -> Life:
        """What a request needs at most."""
        return Life(min(len(spec.tokens), self._chunk), pages_of(spec.stored_rows))

    def demand(self, request: Request) -> Demand:
        """What the next step of a request takes."""
        [asked] = of_class(SpeculativeRequest, [request])
        if asked.decodes:
            return Demand(Kind.SPECULATE, *draft_needs(asked, self._config))
        return self._prompts.demand(asked)

    def launch(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack a block of each request; `max_steps` does not matter."""
        asked = of_class(SpeculativeRequest, requests)
        rows, head_rows, needed = np.sum([draft_needs(r, self._config) for r in asked], axis=0).tolist()
        level = _LEVELS[any(head_level(request.sampling) is not Level.TOP for request in asked)]

        def packed(entry: Entry) -> Packed[PackedDrafts]:
            batch = self._packed(asked, self._pool.book, entry, needed)
            return Packed(batch, self._program(batch, entry, level))

        sizes = self._sizes[level, controlled(asked)]
        chosen = self._parts.choose(sizes, packed, Need(rows, head_rows, len(asked)))

        def run() -> Any:
            return self._pool.run(chosen.executable, *chosen.arguments[:-1], writes=True)

        return Launch(
            run,
            [np.array(block_of(request)) + 1 for request in asked],
            [None] * len(asked),
            lambda found: _taken(found, asked, chosen.batch.order),
            chosen.entry.rows,
        )

    def programs(self) -> Iterator[Program]:
        """What the ladder needs compiled."""
        sampling = SamplingParams(gen_length=2, block_length=1)
        request = SpeculativeRequest(speculative_spec([0], sampling, self._causal, 1), -1)
        pool = self._pool.book.allocate(request.id, request.spec.stored_rows)
        for level, entries in self._entries.items():
            for entry in entries:
                yield self._program(self._packed([request], pool, entry, 1), entry, level)

    def warm(self) -> None:
        """Compile every entry of the ladder; entries with controls are compiled when first needed."""
        self._executables.prepare(list(self.programs()))
        for level, entries in self._entries.items():
            self._sizes[level, False].compiled.update(entries)

    def _packed(
        self, asked: Sequence[SpeculativeRequest], pool: PageBook, entry: Entry, needed: int
    ) -> PackedDrafts:
        """Blocks whose tables have room for `needed` entries, and rarely another than others have."""
        entries = power_bucket(needed, self._pool.entries(entry.rows // TILE_ROWS))
        return pack_drafts(asked, self._config, mask_id_of(self._config), pool, entry, entries)

    def _program(self, batch: PackedDrafts, entry: Entry, level: Level) -> Program:
        arguments = self._params, self._adapter, *batch.arguments, self._pool.abstract
        static = {
            "config": self._config,
            "mask_id": mask_id_of(self._config),
            "logits_chunks": -(-entry.head_rows // self._account.max_num_logits),
            "level": level,
        }
        name = f"draft of {entry.rows} rows"
        return Program(_speculate, arguments, static, donate=("pool",), name=name)


def _taken(
    ran: tuple[EncodedTrace, np.ndarray], asked: Sequence[SpeculativeRequest], order: Sequence[int]
) -> Steps:
    """The evaluations of a part: those that drafted, and the one that verified.

    Arguments:
    - `ran`: what `speculate` returned.
    - `asked`: the requests of the part.
    - `order`: which of them the segments belong to.
    """
    found, drafted = decoded(ran[0]), ran[1]
    most = int(drafted.max())
    lengths = [asked[i].block_length for i in order]
    begins = dict(zip(order, np.cumsum([0, *lengths[:-1]]), strict=True))
    columns = np.concatenate([begins[i] + np.arange(one.block_length) for i, one in enumerate(asked)])
    tokens, counts, logprobs, likeliest = (x[0, columns] for x in found)
    stop = np.cumsum([one.block_length for one in asked])
    for place, i in enumerate(order):
        asked[i].pass_by(most - int(drafted[place]))
    for one, end in zip(asked, stop, strict=True):
        own = slice(end - one.block_length, end)
        counts[own] &= _kept(one, tokens[own])
    steps = Steps(
        np.zeros((most + 1, len(columns)), np.int32),
        np.zeros((most + 1, len(columns)), bool),
        np.zeros((most + 1, len(columns)), np.float32),
        np.zeros((most + 1, *likeliest.shape), LISTED),
    )
    for all_steps, last in zip(steps, (tokens, counts, logprobs, likeliest), strict=True):
        all_steps[-1] = last
    return steps


def _kept(request: SpeculativeRequest, tokens: np.ndarray) -> np.ndarray:
    """Which of the tokens behind the known ones belong to the text, should all be accepted: up to its end."""
    left = len(request.tokens) - request.known
    ends = np.isin(tokens, request.device_stop_ids)
    return (np.arange(len(tokens)) < left) & (np.cumsum(ends) - ends == 0)
