"""What is asked wrongly of a long context is refused in one line that names it and says what is right."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.decoding.prefilling import PRESETS, Prefilling
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig
from jdllm.pallas.device import CPU
from jdllm.planning.account import make_account
from jdllm.prefilling.layout import KeptChunk, Layout
from jdllm.serving.build import make_engine
from jdllm.serving.long.request import LongContext, long_spec
from tests.engines import engine_of
from tests.prefilling.asking import (
    BOS,
    NOTHING,
    PAGES,
    ROWS,
    all_free,
    asked,
    config_of,
    end,
    model_of,
    question,
)

DREAM, LLADA = config_of("prefilling_dllm"), config_of("llada")
MASK, VOCAB = 509, 512


def refused(make: Callable[[], Any], *words: str) -> None:
    with pytest.raises(RequestError) as found:
        make()
    message = str(found.value)
    assert "\n" not in message
    for word in words:
        assert word in message


NO_COUNT = ["an integer from 1 to 16777216"]
PREFILLING = [
    ({"chunk_length": 1}, ["chunk_length is 1", "an integer from 2 to 16777216"]),
    ({"chunk_length": 32.0}, ["chunk_length is 32.0", "an integer from 2"]),
    ({"chunk_length": 2**24 + 1}, ["chunk_length is 16777217"]),
    ({"chunk_bos": None}, ["chunk_bos is None", "True or False"]),
    ({"chunk_bos": False, "bos_id": 5}, ["bos_id is 5", "chunk_bos False", "leave one of them out"]),
    ({"split_from_tail": 1}, ["split_from_tail is 1", "True or False"]),
    ({"bos_id": -1}, ["bos_id is -1", "an integer from 0 to 2147483647", "None"]),
    ({"chunks_kept": 0}, ["chunks_kept is 0", *NO_COUNT]),
    ({"chunks_kept": True}, ["chunks_kept is True", *NO_COUNT]),
    ({"chunks_kept": None}, ["chunks_kept is None", *NO_COUNT]),
    ({"keep_first_chunk": "yes"}, ["keep_first_chunk is 'yes'", "True or False"]),
    ({"draft_length": 0}, ["draft_length is 0", *NO_COUNT]),
    ({"draft_rounds": -1}, ["draft_rounds is -1", "an integer from 0 to 16777216", "None"]),
    ({"draft_steps": 0, "draft_rounds": None}, ["draft_steps is 0", *NO_COUNT, "None"]),
    ({"draft_steps": 2}, ["draft_rounds and draft_steps exclude each other", "None"]),
    ({"score": "attention"}, ["score is 'attention'", "'draft', 'query'"]),
    ({"score_window": 0}, ["score_window is 0", *NO_COUNT]),
    ({"score_unfilled": None}, ["score_unfilled is None", "True or False"]),
    ({"score_mask": "both"}, ["score_mask is 'both'", "'causal', 'full', 'none', 'query_to_chunk'"]),
    ({"tokens_kept": 0}, ["tokens_kept is 0", *NO_COUNT]),
    ({"tokens_kept": 1025}, ["tokens_kept is 1025", "a chunk has 1024 tokens", "keep fewer"]),
    ({"retention": "per_layer"}, ["retention is 'per_layer'", "'global', 'per_head'"]),
    ({"retention_window": 0}, ["retention_window is 0", *NO_COUNT]),
    ({"retention_draft": 0}, ["retention_draft is 0", "True or False"]),
    ({"retention_direction": "all"}, ["retention_direction is 'all'", "'chunk_to_query'", "'both'"]),
    ({"retention_mask": "full"}, ["retention_mask is 'full'", "'causal', 'none', 'query_to_chunk'"]),
    ({"retention_pool": 256}, ["retention_pool is 256", "an integer from 1 to 255"]),
    ({"retention_pooling": "min"}, ["retention_pooling is 'min'", "'max', 'mean'"]),
    ({"retention_rows": "max"}, ["retention_rows is 'max'", "'sum', 'mean'"]),
    ({"retention_heads": "mean"}, ["retention_heads is 'mean'", "'sum', 'max'"]),
    ({"retention_layers": "max"}, ["retention_layers is 'max'", "'mean', 'sum'"]),
    ({"retention_depth": 0}, ["retention_depth is 0", "None for all"]),
    ({"retention_depth": 1.5}, ["retention_depth is 1.5", "an integer from -16777216 to 16777216"]),
    ({"retention_keep": "best"}, ["retention_keep is 'best'", "'high', 'low'"]),
    ({"retention_instruction": "no"}, ["retention_instruction is 'no'", "True or False"]),
    ({"keep_bos": 2}, ["keep_bos is 2", "True or False"]),
    ({"build": "whole"}, ["build is 'whole'", "'full_mask', 'full_query', 'chunk_query', 'chunk_only'"]),
    ({"chunk_positions": "own"}, ["chunk_positions is 'own'", "'continuous', 'reuse', 'absolute'"]),
    ({"query_positions": 0}, ["query_positions is 0", "'after_chunks', 'after_window', 'after_cache'"]),
    ({"chunks": 3}, ["there is no parameter chunks"]),
    *(
        ({"tokens_kept": 9, "retention_direction": direction, "retention_mask": mask}, [mask, "'none'"])
        for direction in ("chunk_to_query", "both")
        for mask in ("causal", "query_to_chunk")
    ),
]


@pytest.mark.parametrize(("fields", "words"), PREFILLING)
def test_settings_are_refused(fields: dict[str, Any], words: list[str]):
    refused(lambda: Prefilling(**fields), "prefilling", *words)
    refused(lambda: Prefilling().changed(**fields), "prefilling", *words)
    given: Any = fields
    refused(lambda: SamplingParams(prefilling=given), "prefilling", *words)


def test_every_setting_can_be_refused():
    assert {name for fields, _ in PREFILLING for name in fields} >= {
        field.name for field in dataclasses.fields(Prefilling)
    }


def test_what_is_no_preset_is_refused():
    wrong: list[Any] = ["dreams", 3, ["dream"], True]
    for value in wrong:
        refused(
            lambda value=value: SamplingParams(prefilling=value),
            "prefilling is",
            "its fields in a mapping",
            "'dream', 'dream_sparse', 'ultrallada'",
        )
    for name, preset in PRESETS.items():
        given: list[Any] = [name, dataclasses.asdict(preset)]
        for value in given:
            assert SamplingParams(prefilling=value).prefilling == preset


def test_scalars_of_numpy_are_numbers():
    given: dict[str, Any] = {"chunk_length": np.int64(32), "keep_bos": np.bool_(False)}
    made = Prefilling(**given)
    assert made == Prefilling(chunk_length=32, keep_bos=False)
    assert type(made.chunk_length) is int


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache": "dual"}, ["cache", "'none'", "'dual'"]),
        ({"cfg_scale": 1.0}, ["cfg_scale", "guidance"]),
        ({"alg": "entropy"}, ["alg", "transfer rules"]),
        ({"prompt_masks": "official"}, ["prompt_masks"]),
        ({"transfer": "adaptive"}, ["'adaptive'", "prefilling"]),
    ],
)
def test_options_that_long_contexts_have_not_are_refused(options: dict[str, Any], words: list[str]):
    refused(lambda: SamplingParams(prefilling=PRESETS["dream"], **options), "prefilling", *words)


def made(
    config: ModelConfig = DREAM,
    *,
    bos_id: int | None = BOS,
    prefilling: dict[str, Any] | None = None,
    parts: dict[str, Any] | None = None,
    **sampling: Any,
) -> Any:
    given = {"gen_length": 8, "block_length": 8, **sampling}
    how = Prefilling(**{"chunk_length": 32, **(prefilling or {})})
    asking = question(61)._asdict() | (parts or {})
    return long_spec(LongContext(**asking), SamplingParams(**given, prefilling=how), config, bos_id)


IDS = np.arange(5)
PARTS = [
    ({"query": NOTHING}, ["the query of a long prompt is empty", "at least one token"]),
    ({"scoring_query": NOTHING}, ["the query of a long prompt is empty"]),
    *(
        case
        for part in ("instruction", "context", "query", "scoring_query")
        for case in (
            ({part: np.append(IDS, VOCAB)}, ["token id 512 at position 5", "0 to 511"]),
            ({part: np.append(IDS, -1)}, ["token id -1 at position 5"]),
            ({part: np.append(IDS, MASK)}, [part, f"mask id {MASK} at position 5", "remove it"]),
            ({part: IDS + 0.5}, ["a flat list of integers"]),
            ({part: IDS[None]}, ["a flat list of integers"]),
        )
    ),
]


@pytest.mark.parametrize(("parts", "words"), PARTS)
def test_parts_of_a_question_are_refused(parts: dict[str, np.ndarray], words: list[str]):
    refused(lambda: made(parts=parts), *words)


SHORT = {"draft_rounds": None, "draft_length": 9}
OPTIONS = [
    (DREAM, {"stop": "end"}, ["stop strings need tokenizer files", "stop_token_ids"]),
    (DREAM, {"stop_token_ids": [3, VOCAB]}, ["stop_token_ids has 512", "0 to 511"]),
    (DREAM, {"bos_id": VOCAB}, ["512", "0 to 511"]),
    (DREAM, {"prefilling": {"bos_id": VOCAB}}, ["bos_id", "512", "0 to 511"]),
    (DREAM, {"prefilling": {"bos_id": MASK}}, ["bos_id", "mask id 509"]),
    (DREAM, {"prefilling": SHORT}, ["a draft of 9 tokens", "block_length is 8", "shorten the draft"]),
    (DREAM, {"steps": 1}, ["1 steps for 8 tokens", "give more steps"]),
    (DREAM, {"steps": 3, "block_length": 4}, ["3 steps for 8 tokens", "give more steps"]),
    (LLADA, {"bos_id": None}, ["no beginning-of-sequence token", "bos_id", "chunk_bos=False"]),
    (LLADA, {"prefilling": {"score_mask": "none"}}, ["score_mask 'none'", "'causal'", "'full'"]),
    (LLADA, {"prefilling": {"score_mask": "query_to_chunk"}}, ["score_mask 'query_to_chunk'", "shifted"]),
    (dataclasses.replace(DREAM, max_positions=5), {}, ["the query has", "5 positions", "the context"]),
    (dataclasses.replace(DREAM, attention="causal"), {}, ["a diffusion model", "causal"]),
    (dataclasses.replace(DREAM, mask_id=None), {}, ["no mask id", "mask_token_id"]),
]


@pytest.mark.parametrize("chunks", ["continuous", "reuse", "absolute"])
@pytest.mark.parametrize("query", ["after_chunks", "after_window", "after_cache"])
def test_positions_are_those_that_are_used_at_most(chunks: str, query: str):
    asked = {"chunk_positions": chunks, "query_positions": query, "chunks_kept": 2}
    spec = made(prefilling=asked)
    selected = range(len(spec.chunks) - 2, len(spec.chunks))
    kept = tuple(KeptChunk(i, spec.chunks[i].tokens, np.arange(len(spec.chunks[i].tokens))) for i in selected)
    layout = Layout(spec.prefilling, spec.long.instruction, kept, spec.long.query, 8, 8)
    ends = [layout.query_start + len(spec.tokens), *(layout.chunk_start(i) + 32 for i in range(2))]
    assert 0 <= spec.positions - max(ends) < 64  # chunks of 32, of which the last may be short


@pytest.mark.parametrize(("config", "options", "words"), OPTIONS)
def test_questions_are_refused(config: ModelConfig, options: dict[str, Any], words: list[str]):
    refused(lambda: made(config, **options), *words)


def test_a_long_prompt_needs_settings():
    refused(lambda: long_spec(question(62), SamplingParams(), DREAM, BOS), "prefilling", "prefilling='dream'")


def test_the_first_of_several_beginnings_is_taken():
    def first(config: ModelConfig, bos_id: int | None, own: int | None) -> int:
        return int(made(config, bos_id=bos_id, prefilling={"bos_id": own}).chunks[0].tokens[0])

    assert (first(DREAM, 3, 4), first(DREAM, 3, None), first(DREAM, None, None)) == (4, 3, DREAM.bos_id)
    assert first(LLADA, None, 0) == 0
    assert first(LLADA, 0, None) == 0


def test_chunks_that_begin_with_no_token_need_none():
    spec = made(LLADA, bos_id=None, prefilling={"chunk_bos": False})
    np.testing.assert_array_equal(np.concatenate([c.tokens for c in spec.chunks]), spec.long.context)


def test_rules_that_need_no_steps_take_any_number_of_them():
    """A number of steps means nothing to them."""
    for steps in (1, 3):
        spec = made(DREAM, steps=steps, transfer="threshold", threshold=0.9)
        assert len(spec.blocks[0].table) >= 8


@pytest.mark.slow
def test_more_than_the_context_has_is_all_of_it(executables: Executables):
    """More chunks than there are, more tokens than a short chunk has, a draft of more rounds than tokens."""
    fields = {"chunks_kept": 99, "tokens_kept": 20, "retention_window": 99, "retention_pool": 40}
    fields |= {"draft_rounds": 99, "draft_length": 3, "score_window": 99}
    engine = engine_of(*model_of("prefilling_dllm"), executables, ROWS, pages=PAGES)
    found = end(engine, asked(question(63, context=32 + 6), DREAM, prefilling=fields)).prefilled
    assert found.selected == [0, 1]
    assert [len(kept) for kept in found.kept] == [20, 7]
    assert MASK not in found.draft
    all_free(engine)


@pytest.mark.slow
def test_what_can_never_run_is_refused_before_anything_runs(executables: Executables):
    """Beside another one that fits just so."""
    model = model_of("prefilling_dllm")
    spec = asked(question(64), DREAM)  # five pages: instruction, two chunks, query, block
    engine = engine_of(*model, executables, ROWS, pages=5)
    refused(lambda: engine.add(spec), "needs 5 pages of the KV pool, which has 4", "set kv_pool=")
    all_free(engine)
    account = make_account(DREAM, "float32", None, device=CPU, max_num_batched_tokens=ROWS, weights_bytes=0)
    engines = [
        make_engine(*model, executables, dataclasses.replace(account, pages=PAGES, max_refresh=most))
        for most in (spec.rows - 1, spec.rows)
    ]
    refused(lambda: engines[0].add(spec), f"a step of {spec.rows} rows", f"at most {spec.rows - 1} fit")
    assert MASK not in end(engines[1], spec).tokens
    all_free(engines[1])
