"""The oracle gives what the published code was recorded to give, and its forward what the models were."""

import numpy as np
import pytest

from tests.helpers import Golden
from tests.prefilling.oracle import Chunk, leave_one_out_scores, score_set
from tests.prefilling.oracle_model import Cache, forward, load, log_softmax
from tests.prefilling.recorded import Case, case_names, run

EVERY_CASE = pytest.mark.parametrize("name", case_names())


def same(mine, recorded) -> None:
    np.testing.assert_array_equal(mine, recorded)


def padded(cut: list[Chunk], size: int) -> np.ndarray:
    return np.stack([np.pad(c.tokens, (0, size - len(c.tokens)), constant_values=-1) for c in cut])


@EVERY_CASE
def test_chunks_are_those_recorded(name: str):
    case, cut = Case(name), run(Case(name)).chunks
    if not cut:
        assert "chunk_tokens" not in case
        return
    same(padded(cut, case.settings["chunk_size"]), case["chunk_tokens"])
    same([len(c.tokens) for c in cut], case["chunk_lengths"])
    same([(c.start, c.end) for c in cut], case["chunk_spans"])


@EVERY_CASE
def test_draft_and_scores_are_those_recorded(name: str):
    case, mine = Case(name), run(Case(name))
    if "draft_states" in case:
        same(mine.draft.states, case["draft_states"])
        same(mine.draft.confirmed, case["draft_confirmed"])
        same(mine.scored, case["draft_scored"])
    else:
        assert len(mine.draft.tokens) == 0
    if mine.chunks:
        np.testing.assert_allclose(mine.scores, case["chunk_scores"], rtol=0, atol=5e-5)
    same(mine.selected, case["selected"])


@EVERY_CASE
def test_kept_tokens_are_those_recorded(name: str):
    case, mine = Case(name), run(Case(name))
    for i, kept in case.many("keep").items():
        same(mine.kept[i], kept)
    scores = {i: s for i, s in enumerate(mine.keep_scores) if s is not None}
    assert scores.keys() == case.many("keep_scores").keys()
    for i, recorded in case.many("keep_scores").items():
        np.testing.assert_allclose(scores[i], recorded, rtol=0, atol=5e-6)


def close_cache(mine: Cache, case: Case, stem: str) -> None:
    for tensor, recorded in ((mine.k, "k"), (mine.v, "v")):
        for layer, which in ((0, "first"), (-1, "last")):
            flat = tensor[layer].reshape(mine.rows, -1)
            np.testing.assert_allclose(flat, case[f"{stem}.{recorded}_{which}"], rtol=1e-4, atol=1e-4)


@EVERY_CASE
def test_the_cache_is_the_one_recorded(name: str):
    case, built = Case(name), run(Case(name)).built
    assert len(built.forwards) == len(case.many("build_ids"))
    for i, one in enumerate(built.forwards):
        same(one.ids, case.many("build_ids")[i])
        same(one.positions, case.many("build_positions")[i])
    assert built.query_start == case.settings["query_start"]
    close_cache(built.cache, case, "kv_build")


@EVERY_CASE
def test_decoding_is_the_one_recorded(name: str):
    case, mine = Case(name), run(Case(name))
    np.testing.assert_allclose(mine.first_logits, case["first_token_logits"], rtol=1e-4, atol=3e-4)
    same(mine.positions, case["decode_positions"])
    slots = np.arange(len(mine.positions))[-case.settings["max_new_tokens"] :]
    same(slots[: case.settings["block_length"]], case["decode_slots"])
    if "kv_decode.k_first" in case:
        close_cache(mine.decoded.opened, case, "kv_decode")
    same(mine.decoded.mask_rows, case["mask_rows"])
    np.testing.assert_allclose(mine.decoded.mask_logits, case["mask_logits"], rtol=1e-4, atol=3e-4)
    same(mine.decoded.kinds, case["state_kinds"])
    same(mine.decoded.states, case["states"])
    same(mine.decoded.output, case["output"])


@pytest.mark.parametrize("family", ["dream", "llada"])
def test_the_forward_is_that_of_the_model(family: str):
    golden = Golden(family)
    tensors = golden.tensors()
    ids = tensors["fwd_b1.input_ids"][0]
    out = forward(load(golden.directory), ids, np.arange(len(ids)))
    np.testing.assert_allclose(out.logits, tensors["fwd_b1.logits"][0], rtol=1e-4, atol=2e-4)


def test_a_left_out_token_is_told_by_its_own_masked_row():
    golden = Golden("llada")
    model, mask_id = load(golden.directory), golden.json("config")["mask_token_id"]
    ids = np.random.default_rng(0).integers(0, 500, 30)
    prefix, chunk, query, labels = np.split(ids, [4, 20, 26])
    scored = np.array([True, False, True, False])
    labels = np.where(scored, labels, mask_id)
    found = leave_one_out_scores(model, prefix, [chunk], query, labels, scored, mask_id, "none", window=2)
    row = np.concatenate([prefix, chunk, query, labels])
    same(score_set(4, 16, 6, scored, window=2), [24, 25, 26, 28])
    terms = []
    for place in (24, 25, 26, 28):
        logits = forward(model, np.where(np.arange(30) == place, mask_id, row), np.arange(30)).logits
        terms.append(log_softmax(logits[place])[row[place]])
    np.testing.assert_allclose(found, [np.mean(terms)], rtol=1e-12)


def test_left_out_under_the_causal_mask_later_tokens_do_not_matter():
    golden = Golden("llada")
    model, mask_id = load(golden.directory), golden.json("config")["mask_token_id"]
    ids = np.random.default_rng(1).integers(0, 500, 24)
    prefix, chunk, query, labels = np.split(ids, [3, 15, 20])

    def scores(labels: np.ndarray, mask) -> np.ndarray:
        none = np.zeros(len(labels), bool)
        return leave_one_out_scores(model, prefix, [chunk], query, labels, none, mask_id, mask)

    for mask in ("causal", "full"):
        np.testing.assert_allclose(scores(labels, mask), scores(labels[:0], mask), rtol=1e-12)
    assert abs(scores(labels, "none") - scores(labels[:0], "none")) > 1e-4
