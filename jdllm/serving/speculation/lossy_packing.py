"""Packs blocks that are drafted, and perhaps verified, into arrays of compiled sizes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jdllm.arrays import padded
from jdllm.decoding.batch import Batch
from jdllm.decoding.lossy_speculation import Verification
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.pallas.split_attention import PageTable
from jdllm.planning.ladder import Entry
from jdllm.serving.blocks.packing import pages_of
from jdllm.serving.packing import head_rows, segment_params
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.rule_states import packed_states
from jdllm.serving.speculation.lossy_request import LossyRequest
from jdllm.serving.speculation.packing import DraftNeeds, Tiled, tables_of


class PackedRounds(NamedTuple):
    """Blocks with masks behind stored rows.

    - `batch`: the blocks; head rows are all their masks.
    - `draft_end`: behind the last row that each row sees in a draft.
    - `verification`: when drafts are verified.
    - `stored`, `seen`: what each tile sees, without and with the rows of its own block; the former twice.
    - `candidates`: for each request the positions of its head rows, which follow one another in the batch.
    """

    batch: Batch
    draft_end: Int[np.ndarray, " rows"]
    verification: Verification
    stored: PageTable
    seen: PageTable
    candidates: list[np.ndarray]

    @property
    def arguments(self) -> tuple[Batch, np.ndarray, Verification, PageTable, PageTable]:
        """What the device needs."""
        return self.batch, self.draft_end, self.verification, self.stored, self.seen


def round_needs(request: LossyRequest, tile_rows: int) -> DraftNeeds:
    """What a draft of the current block of a request and its verification take, in tiles of so many rows."""
    tiles = _tiles(request, tile_rows)
    entries = tiles * (2 * pages_of(request.computed) + 1)
    return DraftNeeds(tiles * tile_rows, len(request.masked()), entries)


def pack_rounds(
    requests: Sequence[LossyRequest],
    config: ModelConfig,
    pool: PageBook,
    entry: Entry,
    entries: int,
    tile_rows: int,
) -> PackedRounds:
    """Lay out the current block of each request in whole tiles.

    Arguments:
    - `requests`: whose finished blocks are stored.
    - `config`: the model.
    - `pool`: the pages of the requests.
    - `entry`: the sizes of the arrays.
    - `entries`: of the page tables.
    - `tile_rows`: rows of a tile.
    """
    tiles = [_tiles(request, tile_rows) for request in requests]
    starts = (np.cumsum([0, *tiles[:-1]]) * tile_rows).tolist()
    tokens, positions, k_start, k_end, draft_end = (np.zeros(entry.rows, np.int32) for _ in range(5))
    candidates = [request.masked() for request in requests]
    for request, masked, start in zip(requests, candidates, starts, strict=True):
        rows = np.arange(start, start + request.block_length)
        tokens[rows], positions[rows] = request.tokens[request.forwarded], request.forwarded
        k_start[rows], k_end[rows], draft_end[rows] = start, rows + 1, rows[-1] + 1
        if request.seen_length == 1:
            before = rows[: masked[0] - request.known]
            draft_end[before] = before + 1
    row = np.concatenate(
        [start + masked - r.known for r, masked, start in zip(requests, candidates, starts, strict=True)]
    )
    segment = np.repeat(np.arange(len(requests)), list(map(len, candidates)))
    batch = Batch(
        tokens,
        Rows(positions, k_start, k_end),
        head_rows(row, row, segment, entry),
        segment_params(requests, entry, config),
        packed_states(requests, candidates, entry),
    )
    stored = [request.computed for request in requests]
    blocks = [Tiled(*each) for each in zip(requests, stored, tiles, starts, strict=True)]
    tables = tables_of(blocks, pool, entry.rows // tile_rows, entries, 2)
    return PackedRounds(batch, draft_end, _verification(requests, entry), *tables, candidates)


def _verification(requests: Sequence[LossyRequest], entry: Entry) -> Verification:
    rows = [_asked(request.sampling, verifies=request.verifies) for request in requests]
    columns = {name: padded(np.array([row[name] for row in rows]), entry.segments) for name in rows[0]}
    return Verification(**columns)


def _asked(sampling: SamplingParams, *, verifies: bool) -> dict[str, np.generic]:
    """What a request asks of its next step: an entry of each array of `Verification`.

    Arguments:
    - `verifies`: whether its last draft was verified.
    """
    asked, policy = sampling.options, sampling.effective("verify_policy")
    bound = f"verify_{policy}"
    if policy == "hysteresis":
        bound = "verify_off" if verifies else "verify_on"
    return {
        "by_span": np.bool_(policy == "span"),
        "bound": np.float32(asked[bound]),
        "strict": np.bool_(bound == "verify_on"),
        "cost": np.float32(asked["verify_cost"]),
        "cost_each": np.bool_(asked["verify_cost_each"]),
        "sharpness": np.float32(asked["verify_sharpness"]),
        "commit_sure": np.bool_(asked["commit_sure"]),
    }


def _tiles(request: LossyRequest, tile_rows: int) -> int:
    return -(-request.block_length // tile_rows)
