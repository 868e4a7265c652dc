"""The settings of a recorded run under our names."""

from typing import Any

from jdllm.decoding.prefilling import Prefilling
from jdllm.decoding.sampling import SamplingParams

_BUILD = {
    "full_prompt_mask": "full_mask",
    "full_prompt_query": "full_query",
    "chunk_query": "chunk_query",
    "chunk_only": "chunk_only",
}
_QUERY_POSITIONS = {
    "after_selected_chunks": "after_chunks",
    "after_reused_window": "after_window",
    "after_cache": "after_cache",
}


def prefilling_of(settings: dict[str, Any], bos_id: int) -> Prefilling:
    """What a recorded run asks for."""
    depth = settings["token_score_layers"] or None
    if depth and settings["token_score_layer_mode"] == "last":
        depth = -depth
    values: dict[str, Any] = {
        "chunk_length": settings["chunk_size"],
        "split_from_tail": settings["split_from_tail"],
        "chunk_bos": settings["chunk_bos"],
        "bos_id": bos_id if settings["chunk_bos"] else None,
        "chunks_kept": settings["topk_chunks"],
        "keep_first_chunk": settings["keep_first_chunk"],
        "draft_length": settings["score_draft_tokens"],
        "draft_rounds": settings["score_draft_partial_rounds"],
        "draft_steps": settings["score_draft_partial_steps"],
        "score": "draft" if settings["score_mode"] == "draft_self_information" else "query",
        "score_window": settings["score_query_window"] or None,
        "score_unfilled": settings["score_draft_score_all_slots"],
        "score_mask": settings["score_attention_mask"],
        "tokens_kept": settings["token_capacity"] or None,
        "retention": settings["token_eviction_granularity"],
        "retention_window": settings["token_score_query_window"],
        "retention_draft": settings["token_score_use_generated"],
        "retention_direction": settings["token_score_direction"].replace("bidirectional", "both"),
        "retention_mask": settings["token_attention_mask"].replace("full", "none"),
        "retention_pool": settings["token_score_pool_kernel"],
        "retention_pooling": settings["token_score_pooling"].removesuffix("pool").replace("avg", "mean"),
        "retention_rows": settings["token_score_reduce"],
        "retention_heads": settings["token_score_head_reduce"],
        "retention_layers": settings["token_score_layer_reduce"],
        "retention_depth": depth,
        "retention_keep": settings["token_score_keep"],
        "retention_instruction": settings["token_score_include_prefix"],
        "keep_bos": settings["force_keep_chunk_bos"],
        "build": _BUILD[settings["cache_build_mode"]],
        "chunk_positions": settings["chunk_position_mode"],
        "query_positions": _QUERY_POSITIONS[settings["query_position_mode"]],
    }
    return Prefilling(**values)


def sampling_of(settings: dict[str, Any], bos_id: int) -> SamplingParams:
    """The same with what is asked of the sampler."""
    return SamplingParams(
        gen_length=settings["max_new_tokens"],
        block_length=settings["block_length"],
        transfer="threshold",
        threshold=settings["threshold"],
        early_stop=False,
        prefilling=prefilling_of(settings, bos_id),
        return_history=True,
    )
