"""Runs requests of block models whose drafts the model may verify."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jdllm.compiling.executables import Program
from jdllm.decoding.encoded_trace import EncodedTrace, Steps, encoding
from jdllm.decoding.encoded_trace import decode as decoded
from jdllm.decoding.lossy_speculation import draft_and_verify
from jdllm.decoding.sampling import SamplingParams
from jdllm.pallas.masked_logits import Level
from jdllm.planning.buckets import power_bucket
from jdllm.planning.ladder import Entry, Ladder, Sizes
from jdllm.serving.background import Background
from jdllm.serving.blocks.runner import BlockRunner
from jdllm.serving.demands import Demand, Kind, Life
from jdllm.serving.denoise.cached_runner import step_static
from jdllm.serving.launch import Launch
from jdllm.serving.on_device import OnDevice
from jdllm.serving.part_runner import Need, Packed, PartRunner
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.request import Request, of_class
from jdllm.serving.spec import RequestSpec
from jdllm.serving.speculation.lossy_packing import PackedRounds, pack_rounds, round_needs
from jdllm.serving.speculation.lossy_request import LossyRequest, lossy_spec

_draft_and_verify = encoding(draft_and_verify)


class LossyRunner:
    """Drafts blocks and verifies drafts.

    Arguments:
    - `model`: the model on its device, whose logits are not shifted.
    - `blocks`: stores finished blocks.
    - `ladder`: the sizes of its steps that rank a whole vocabulary are those of drafts.
    - `background`: compiles sizes that fit better than those that serve now.
    """

    def __init__(self, model: OnDevice, blocks: BlockRunner, ladder: Ladder, background: Background):
        self._params, self._config, self._executables, self._account, self._pool = model
        self._blocks, self._tile_rows, self._entries = blocks, ladder.tile_rows, ladder.ranked
        self._parts = PartRunner(model, background)
        self._sizes = {causal: Sizes(ladder.ranked) for causal in (False, True)}

    def life(self, spec: RequestSpec) -> Life:
        """What a request needs at most."""
        return self._blocks.life(spec)

    def demand(self, request: Request) -> Demand:
        """What the next step of a request takes."""
        [asked] = of_class(LossyRequest, [request])
        if asked.denoises:
            return Demand(Kind.VERIFY, *round_needs(asked, self._tile_rows))
        return self._blocks.store_demand(asked)

    def launch(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack the current block of each request; `max_steps` does not matter."""
        asked = of_class(LossyRequest, requests)
        rows, head_rows, needed = np.sum(
            [round_needs(request, self._tile_rows) for request in asked], axis=0
        ).tolist()
        causal = any(request.seen_length == 1 for request in asked)
        listed = any(request.sampling.listed for request in asked)

        def packed(entry: Entry) -> Packed[PackedRounds]:
            batch = self._packed(asked, self._pool.book, entry, needed)
            return Packed(batch, self._program(batch, entry, causal=causal))

        chosen = self._parts.choose(self._sizes[causal], packed, Need(rows, head_rows, len(asked)))

        def run() -> Any:
            trace, verified = chosen.executable(*chosen.arguments[:-1], self._pool.device())
            return trace if listed else trace._replace(likeliest=None), verified

        return Launch(
            run,
            chosen.batch.candidates,
            [None] * len(asked),
            lambda found: _taken(found, asked),
            chosen.entry.rows,
        )

    def programs(self) -> Iterator[Program]:
        """What the ladder needs compiled."""
        sampling = SamplingParams(gen_length=1, block_length=1, transfer="lossy_speculation")
        request = LossyRequest(lossy_spec([0], sampling, self._config), -1)
        request.find(request.known)
        pool = self._pool.book.allocate(request.id, 2)
        for causal in self._sizes:
            for entry in self._entries:
                yield self._program(self._packed([request], pool, entry, 1), entry, causal=causal)

    def warm(self) -> None:
        """Compile every entry of the ladder."""
        self._executables.prepare(list(self.programs()))
        for sizes in self._sizes.values():
            sizes.compiled.update(self._entries)

    def _packed(
        self, asked: Sequence[LossyRequest], pool: PageBook, entry: Entry, needed: int
    ) -> PackedRounds:
        """Blocks whose tables have room for `needed` entries, and rarely another than others have."""
        entries = power_bucket(needed, self._pool.entries(entry.rows // self._tile_rows))
        return pack_rounds(asked, self._config, pool, entry, entries, self._tile_rows)

    def _program(self, batch: PackedRounds, entry: Entry, *, causal: bool) -> Program:
        arguments = self._params, *batch.arguments, self._pool.abstract
        static = step_static(self._config, self._account, entry, Level.FILTERED) | {"causal": causal}
        return Program(_draft_and_verify, arguments, static, name=f"lossy draft of {entry.rows} rows")


def _taken(ran: tuple[EncodedTrace, np.ndarray], asked: Sequence[LossyRequest]) -> Steps:
    """The evaluations of a part: a step that drafts, where anything is verified, and one that commits.

    Arguments:
    - `ran`: what `draft_and_verify` returned.
    - `asked`: the requests of the part.
    """
    steps, verified = decoded(ran[0]), ran[1][: len(asked)].tolist()
    for request, each in zip(asked, verified, strict=True):
        request.find_verdict(verified=each, beside=any(verified))
    if not any(verified):
        return steps
    drafted = steps._replace(committed=np.zeros_like(steps.committed))
    return Steps(*(np.concatenate(both) for both in zip(drafted, steps, strict=True)))
