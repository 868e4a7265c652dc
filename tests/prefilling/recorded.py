"""The recorded runs of `tests/goldens/prefilling_dllm`, and the oracle's run under the same settings."""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from tests.helpers import Golden
from tests.prefilling.oracle import (
    QUERY_PREFILL,
    Chunk,
    Decoded,
    Draft,
    Tokens,
    chunk_scores,
    chunks,
    decode,
    draft,
    select,
)
from tests.prefilling.oracle_cache import (
    Built,
    Layout,
    Retention,
    Rows,
    build_parts,
    build_whole,
    keep,
    prefill_query,
)
from tests.prefilling.oracle_model import Model, load

GOLDEN = Golden("prefilling_dllm")


@functools.cache
def _records() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return GOLDEN.json("goldens"), GOLDEN.tensors()


@functools.cache
def model() -> Model:
    return load(GOLDEN.directory)


def case_names() -> list[str]:
    return list(_records()[0]["cases"])


@dataclasses.dataclass(frozen=True)
class Case:
    """One recorded run: its settings under their public names, and its tensors.

    - `changes`: settings that it was not recorded with, which leave it its inputs alone.
    """

    name: str
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        return _records()[0]["cases"][self.name] | dict(self.changes)

    @property
    def mask_id(self) -> int:
        return _records()[0]["mask_id"]

    @property
    def bos_id(self) -> int:
        return _records()[0]["bos_id"]

    def __contains__(self, tensor: str) -> bool:
        return f"{self.name}.{tensor}" in _records()[1]

    def __getitem__(self, tensor: str) -> np.ndarray:
        return _records()[1][f"{self.name}.{tensor}"]

    def many(self, stem: str) -> dict[int, np.ndarray]:
        """All tensors `<stem>.<number>`."""
        head = f"{self.name}.{stem}."
        return {int(n.removeprefix(head)): t for n, t in _records()[1].items() if n.startswith(head)}

    @property
    def scoring_query(self) -> np.ndarray:
        return self["scoring_query_ids"] if "scoring_query_ids" in self else self["query_ids"]


class Run(NamedTuple):
    """What the oracle gives at every stage."""

    chunks: list[Chunk]
    draft: Draft
    scored: np.ndarray
    scores: np.ndarray
    selected: list[int]
    kept: list[Rows]
    keep_scores: list[np.ndarray | None]
    built: Built
    positions: np.ndarray
    first_logits: np.ndarray
    decoded: Decoded


def retention(settings: dict[str, Any]) -> Retention:
    """The switches of step 4 by their public names."""
    return Retention(
        capacity=settings["token_capacity"],
        window=settings["token_score_query_window"],
        mask=settings["token_attention_mask"],
        direction=settings["token_score_direction"],
        reduce=settings["token_score_reduce"],
        pooling=settings["token_score_pooling"],
        kernel=settings["token_score_pool_kernel"],
        head_reduce=settings["token_score_head_reduce"],
        layer_reduce=settings["token_score_layer_reduce"],
        layers=settings["token_score_layers"],
        layer_mode=settings["token_score_layer_mode"],
        keep=settings["token_score_keep"],
        with_prefix=settings["token_score_include_prefix"],
        keep_bos=settings["force_keep_chunk_bos"] and settings["chunk_bos"],
        per_head=settings["token_eviction_granularity"] == "per_head",
    )


def _draft(case: Case, any_chunks: bool) -> tuple[Draft, np.ndarray]:
    s = case.settings
    if s["score_mode"] == "self_information" or not any_chunks:
        return Draft(np.zeros(0, int), np.zeros(0, bool), np.zeros((0, 0), int)), np.zeros(0, bool)
    made = draft(
        model(),
        case["prefix_ids"],
        case.scoring_query,
        s["score_draft_tokens"],
        case.mask_id,
        rounds=s["score_draft_partial_rounds"],
        steps=s["score_draft_partial_steps"],
        block_length=s["block_length"],
        threshold=s["threshold"],
    )
    return made, made.confirmed | s["score_draft_score_all_slots"]


def _build(
    case: Case, parts: list[Tokens], kept: list[Rows], layout: Layout, ask: Tokens
) -> tuple[Built, np.ndarray]:
    s, mode = case.settings, case.settings["cache_build_mode"]
    prefix, query = case["prefix_ids"], case["query_ids"]
    if mode.startswith("full_prompt"):
        masks = np.full(s["max_new_tokens"] if mode == "full_prompt_mask" else 0, case.mask_id)
        return build_whole(model(), prefix, parts, kept, query, masks, layout), masks
    window = ask[-s["token_score_query_window"] :]
    alone = mode == "chunk_only"
    built = build_parts(model(), prefix, parts, kept, window, s["token_attention_mask"], layout, alone)
    return built, np.zeros(0, int)


@functools.cache
def run(case: Case) -> Run:
    """The oracle over one recorded case, from its ids and settings alone."""
    s, prefix, query = case.settings, case["prefix_ids"], case["query_ids"]
    bos_id = case.bos_id if s["chunk_bos"] else None
    cut = chunks(case["context_ids"], s["chunk_size"], bos_id, s["split_from_tail"])
    parts = [chunk.tokens for chunk in cut]
    labels, scored = _draft(case, bool(cut))
    scores = chunk_scores(
        model(),
        prefix,
        parts,
        case.scoring_query,
        labels.tokens,
        scored,
        s["score_attention_mask"],
        s["score_query_window"],
    )
    selected = select(scores, s["topk_chunks"], s["keep_first_chunk"])
    parts = [parts[i] for i in selected]
    filled = labels.tokens[labels.confirmed] if s["token_score_use_generated"] else labels.tokens[:0]
    ask = np.concatenate([case.scoring_query, filled])
    found = [keep(model(), prefix, part, ask, retention(s)) for part in parts]
    kept, keep_scores = [rows for rows, _ in found], [one for _, one in found]
    layout = Layout(
        len(prefix), s["chunk_size"], selected, s["chunk_position_mode"], s["query_position_mode"]
    )
    ask = np.concatenate([case.scoring_query, labels.tokens])
    built, masks = _build(case, parts, kept, layout, ask)
    if built.query_logits is None:
        cache, positions, last = prefill_query(model(), built, query)
    else:
        cache, positions, last = built.cache, built.positions, built.query_logits
    rest = s["max_new_tokens"] - len(masks)
    after = built.query_start + len(query) + len(masks) + np.arange(rest)
    positions = np.concatenate([positions, after])
    decoded = decode(
        model(), cache, positions, last, s["max_new_tokens"], s["block_length"], s["threshold"], case.mask_id
    )
    if built.query_logits is None:
        empty = np.full((1, s["max_new_tokens"]), case.mask_id)
        decoded = decoded._replace(
            states=np.concatenate([empty, decoded.states]), kinds=np.append(QUERY_PREFILL, decoded.kinds)
        )
    return Run(cut, labels, scored, scores, selected, kept, keep_scores, built, positions, last, decoded)
