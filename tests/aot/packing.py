"""Batches of requests for steps that are compiled only."""

from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.config import ModelConfig
from jdllm.planning.ladder import Sizes, denoising_tile_rows, make_ladder
from jdllm.serving.denoise.cached_packing import ReuseBatch, pack_refresh, pack_reuse, reuse_demand
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.request import Request
from tests.engines import entry_of


def packed_reuse(asked: list[Request], pages: PageBook, config: ModelConfig) -> ReuseBatch:
    """The part that follows a refresh of all."""
    refreshed = pack_refresh(asked, config, pages, entry_of(asked))
    for request, stored in zip(asked, refreshed.stored, strict=True):
        assert stored is not None
        request.store(*stored)
    tile_rows = denoising_tile_rows(shifted=config.logits_shift)
    demands = (reuse_demand(request, PAGE_ROWS, tile_rows) for request in asked)
    rows, head_rows, _ = (sum(x) for x in zip(*demands, strict=True))
    entry = Sizes(make_ladder(8192, tile_rows=tile_rows).reuse).choose(rows, head_rows, len(asked))
    return pack_reuse(asked, config, pages, entry, 2 * pages.pages, tile_rows)
