"""The stages on the host, and the draft, each beside what the published code was recorded to do in it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.compiling.executables import Executables
from jdllm.prefilling.build import Evaluation, advancing, building
from jdllm.prefilling.chunks import cut
from jdllm.prefilling.draft import draft, draft_segment, timetable
from jdllm.prefilling.layout import KeptChunk, Layout
from jdllm.prefilling.select import best_chunks, best_tokens
from jdllm.serving.part_packing import packed_rows
from tests.prefilling import oracle
from tests.prefilling.asking import NOTHING, config_of, ids_of, model_of, recorded_spec
from tests.prefilling.oracle_cache import token_mask
from tests.prefilling.recorded import Case, case_names
from tests.prefilling.settings import prefilling_of

EVERY_CASE = pytest.mark.parametrize("name", case_names())
SEVERAL_BLOCKS = [
    name
    for name in case_names()
    if Case(name).settings["max_new_tokens"] > Case(name).settings["block_length"]
]


def same(mine: Any, recorded: Any) -> None:
    np.testing.assert_array_equal(mine, recorded)


def layout_of(case: Case) -> Layout:
    """The layout of a recorded run, from what it was recorded to select and to keep."""
    settings, kept, chunks = case.settings, case.many("keep"), []
    for place, index in enumerate(case["selected"].tolist()):
        tokens = case["chunk_tokens"][index][: case["chunk_lengths"][index]]
        chunks.append(KeptChunk(index, tokens, kept.get(place, np.arange(len(tokens)))))
    return Layout(
        prefilling_of(settings, case.bos_id),
        ids_of(case, "prefix"),
        tuple(chunks),
        case["query_ids"],
        settings["max_new_tokens"],
        settings["block_length"],
    )


def window_of(case: Case) -> np.ndarray:
    """What stands behind a chunk that is encoded by itself."""
    drafted = case["draft_states"][-1] if "draft_states" in case else NOTHING
    behind = np.concatenate([case.scoring_query, drafted])
    return behind[-case.settings["token_score_query_window"] :]


def built(case: Case) -> list[Evaluation]:
    return list(building(layout_of(case), window_of(case), case.mask_id, shifted=True))


def segments_of(evaluation: Evaluation) -> list[slice]:
    """Rows that see each other: those of one segment begin to see at its first row."""
    starts = np.unique(evaluation.rows.k_start)
    return [slice(int(a), int(b)) for a, b in zip(starts, [*starts[1:], evaluation.rows.size], strict=True)]


@EVERY_CASE
def test_chunks_are_those_recorded(name: str):
    case = Case(name)
    context = ids_of(case, "context")
    size = case.settings["chunk_size"]
    chunks = cut(context, size, case.bos_id, from_tail=case.settings["split_from_tail"])
    if not chunks:
        assert "chunk_tokens" not in case
        return
    same([len(c.tokens) for c in chunks], case["chunk_lengths"])
    same([(c.start, c.stop) for c in chunks], case["chunk_spans"])
    for chunk, row, length in zip(chunks, case["chunk_tokens"], case["chunk_lengths"], strict=True):
        same(chunk.tokens, row[:length])


@given(st.lists(st.integers(0, 2), max_size=20), st.integers(2, 7), st.sampled_from([0, None]), st.booleans())
def test_chunks_are_those_of_the_oracle(context: list[int], size: int, bos_id: int | None, from_tail: bool):
    ids = np.array(context, np.int32)
    mine, theirs = cut(ids, size, bos_id, from_tail=from_tail), oracle.chunks(ids, size, bos_id, from_tail)
    assert [(c.tokens.tolist(), c.start, c.stop) for c in mine] == [
        (c.tokens.tolist(), c.start, c.end) for c in theirs
    ]


@EVERY_CASE
@pytest.mark.slow
def test_a_draft_is_the_one_recorded_after_every_number_of_rounds(name: str, executables: Executables):
    case = Case(name)
    if "draft_states" not in case:
        return
    params, config = model_of("prefilling_dllm")
    prefilling = prefilling_of(case.settings, case.bos_id)
    prefix, slots = layout_of(case).prefix, prefilling.draft_length
    segment = draft_segment(prefix, case.scoring_query, slots, case.mask_id)
    tokens, rows = packed_rows(segment, 64)
    at = np.arange(segment.size - slots, segment.size, dtype=np.int32)
    whole = timetable(prefilling, case.settings["threshold"])
    static = {"config": config, "mask_id": case.mask_id}
    for rounds, recorded in enumerate(case["draft_states"]):
        quota = np.where(np.arange(slots) < rounds, whole.quota, 0)
        arguments = params, tokens, rows, at, whole._replace(quota=quota)
        found = np.asarray(executables.call(draft, *arguments, **static))
        same(found[:-1], recorded)
        assert found[-1] == rounds + 1
    found = np.asarray(executables.call(draft, params, tokens, rows, at, whole, **static))
    same(found[:-1], case["draft_states"][-1])
    assert found[-1] == len(case["draft_states"])
    same(found[:-1] != case.mask_id, case["draft_confirmed"])


@EVERY_CASE
def test_what_is_selected_and_kept_follows_from_what_was_recorded(name: str):
    case = Case(name)
    prefilling = prefilling_of(case.settings, case.bos_id)
    if "chunk_scores" in case:
        chosen = best_chunks(
            case["chunk_scores"], prefilling.chunks_kept, keep_first=prefilling.keep_first_chunk
        )
        same(chosen, case["selected"])
    for i, values in case.many("keep_scores").items():
        assert prefilling.tokens_kept is not None
        lowest = prefilling.retention_keep == "low"
        kept = best_tokens(values, prefilling.tokens_kept, lowest=lowest, keep_first=prefilling.keep_bos)
        same(kept, case.many("keep")[i])


SCORES = st.lists(st.sampled_from([0.0, 1.0, 2.0, -1.0, np.nan, np.inf, -np.inf]), min_size=1, max_size=9)


@given(SCORES, st.integers(1, 10), st.booleans())
def test_equal_scores_select_the_earlier_chunk(scores: list[float], count: int, keep_first: bool):
    mine = best_chunks(np.array(scores, np.float32), count, keep_first=keep_first)
    same(mine, oracle.select(np.array(scores), count, keep_first))


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=3),
    st.integers(1, 8),
    st.booleans(),
    st.booleans(),
)
def test_equal_values_keep_the_earlier_token(
    values: list[list[int]], count: int, lowest: bool, keep_first: bool
):
    found = best_tokens(np.array(values, np.float32), count, lowest=lowest, keep_first=keep_first)
    for kept, row in zip(found.tolist(), values, strict=True):
        rank = sorted(range(6), key=lambda i: (not (keep_first and i == 0), row[i] if lowest else -row[i], i))
        assert kept == sorted(rank[:count])


@EVERY_CASE
def test_parts_are_stored_where_they_were_recorded_to_be(name: str):
    case = Case(name)
    layout, positions = layout_of(case), case["decode_positions"]
    assert layout.query_start == case.settings["query_start"]
    bounds = np.cumsum([0, *layout.part_rows])
    assert bounds[-1] == len(positions)
    content = [layout.prefix, *(chunk.tokens for chunk in layout.chunks), layout.query]
    stored: set[int] = set()
    for evaluation in built(case):
        for part, source, places in evaluation.stores:
            assert part not in stored
            stored.add(part)
            same(places, positions[bounds[part] : bounds[part + 1]])
            tokens = evaluation.rows.tokens[source]
            if part < len(content):
                chunk = 0 < part < layout.query_part
                kept = layout.chunks[part - 1].kept if chunk else np.arange(len(content[part]))
                same(tokens, np.broadcast_to(content[part][kept], tokens.shape))
            else:
                assert (tokens == case.mask_id).all()
    masks = layout.prefilling.build == "full_mask" or layout.blocks > 1
    assert stored == set(range(layout.query_part + 1 + masks * layout.blocks))


@EVERY_CASE
def test_evaluations_are_those_recorded(name: str):
    case = Case(name)
    layout, first = layout_of(case), built(case)[0]
    ids, positions = case.many("build_ids"), case.many("build_positions")
    assert not first.reads
    if layout.prefilling.build in ("full_mask", "full_query"):
        size = len(ids[0])
        same(first.rows.tokens[:size], ids[0])
        same(first.rows.positions[:size], positions[0])
        same(first.rows.k_start, 0)
        same(first.rows.k_end[:size], size)  # nobody sees the row that is added
        assert first.rows.size == size + (layout.prefilling.build == "full_query")
        return
    mask, prefix = case.settings["token_attention_mask"], len(layout.prefix)
    segments = segments_of(first)
    assert len(segments) == len(ids) == len(layout.chunks) + 1
    same(first.rows.tokens[segments[0]], ids[0])
    for number, rows in enumerate(segments):
        alone = number == 0 or layout.prefilling.build == "chunk_only"
        before = 0 if alone else prefix
        chunk = len(ids[0]) if number == 0 else len(layout.chunks[number - 1].tokens)
        tokens, size = first.rows.tokens[rows], rows.stop - rows.start
        same(tokens[:before], layout.prefix[:before])
        same(tokens[before:], ids[number][: size - before])
        same(first.rows.positions[rows], positions[number][:size])
        seen = np.ones((size, size), bool)
        if not alone:
            behind = len(ids[number]) - chunk
            recorded = token_mask(mask, prefix, chunk, behind)
            recorded[:prefix, prefix:], recorded[:prefix, :prefix] = False, True  # the cached instruction
            assert not recorded[:size, size:].any()
            assert size >= prefix + chunk
            seen = recorded[:size, :size]
        key, end = np.arange(size), first.rows.k_end[rows, None] - rows.start
        same(key < end, seen)


@EVERY_CASE
def test_one_evaluation_opens_the_first_block(name: str):
    """Its head row comes behind the query's last, which tells the first token."""
    case = Case(name)
    layout, evaluations = layout_of(case), built(case)
    (opening,) = (e for e in evaluations if e.opens is not None)
    assert opening.opens == 0
    (row,) = opening.head
    start = len(case["decode_positions"]) - layout.gen_length
    assert opening.rows.tokens[row] == case.mask_id
    assert opening.rows.tokens[row - 1] == layout.query[-1]
    if not any(chunk.per_head for chunk in layout.chunks):
        assert opening.rows.positions[row] == case["decode_positions"][start]
    if layout.prefilling.build in ("chunk_query", "chunk_only"):
        assert opening.reads == tuple(range(layout.query_part))
        same(opening.rows.tokens[:-1], layout.query)
        same(opening.rows.k_end[:-1], len(layout.query))
        same(opening.rows.positions[:-1], layout.query_start + np.arange(len(layout.query)))


@pytest.mark.parametrize("name", SEVERAL_BLOCKS)
def test_between_blocks_what_is_finished_is_stored_and_the_masks_are_stored_anew(name: str):
    case = Case(name)
    layout, positions = layout_of(case), case["decode_positions"]
    finished = case["states"][case["state_kinds"] == oracle.WRITE_BACK]
    answer = positions[len(positions) - layout.gen_length :]
    parts = range(len(layout.part_rows))
    for block in range(1, layout.blocks):
        slots, following = layout.block_slots(block - 1), layout.block_slots(block).start
        tokens = finished[block - 1][slots]
        evaluations = list(advancing(layout, block, tokens, case.mask_id, shifted=True))
        first, own = evaluations[0], layout.block_part(block - 1)
        same(first.rows.tokens, [*tokens, case.mask_id])
        same(first.rows.positions, answer[[*slots, following]])
        same(first.rows.k_end, [*[len(slots)] * len(slots), 0])
        assert first.reads == tuple(part for part in parts if part != own)
        assert (first.opens, first.head) == (block, (len(slots),))
        assert [stored.part for stored in first.stores] == [own]
        same(first.stores[0].source, [[np.arange(len(slots))]])
        same(first.stores[0].positions, answer[slots])
        if block + 1 == layout.blocks:
            assert len(evaluations) == 1
            continue
        _, masks = evaluations
        same(masks.rows.tokens, case.mask_id)
        same(masks.rows.positions, answer[following:])
        assert masks.reads == tuple(range(layout.block_part(block)))
        assert [stored.part for stored in masks.stores] == [
            layout.block_part(b) for b in range(block, layout.blocks)
        ]
        rows = np.concatenate([stored.source.reshape(-1) for stored in masks.stores])
        same(rows, np.arange(masks.rows.size))
        same(np.concatenate([stored.positions for stored in masks.stores]), answer[following:])


@EVERY_CASE
def test_what_a_request_needs_at_most_is_enough(name: str):
    """Rows of the largest evaluation, and of the pool; no more than that where all chunks are as long."""
    case = Case(name)
    layout, spec = layout_of(case), recorded_spec(name, config_of("prefilling_dllm"))
    prefix, window = len(layout.prefix), len(window_of(case))
    lengths = [len(chunk.tokens) for chunk in spec.chunks]
    rows = [evaluation.rows.size for evaluation in built(case)]
    rows.append(prefix + len(case.scoring_query) + spec.prefilling.draft_length * bool(lengths))
    rows += [prefix + length + len(spec.long.scoring_query) + spec.prefilling.drafted for length in lengths]
    rows.append(sum(prefix + len(chunk.tokens) + window for chunk in layout.chunks))
    assert max(rows) <= spec.rows
    assert spec.kept_chunks == len(layout.chunks)
    assert sum(-(-part // 64) for part in layout.part_rows) * 64 <= spec.stored_rows
    longest = sorted(lengths)[len(lengths) - len(layout.chunks) :]
    if longest == sorted(len(chunk.tokens) for chunk in layout.chunks):
        assert sum(-(-part // 64) for part in layout.part_rows) * 64 == spec.stored_rows
