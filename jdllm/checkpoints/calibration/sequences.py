"""Texts as the sequences that a model sees while it generates, packed into rows.

- A causal model sees plain text.
- A model that denoises sees texts with masks. Each sequence draws a ratio between 0 and 1, and each of its
  tokens is masked with this probability, as in the training of these models.
- A block model sees finished blocks, and one block with masks behind them. So each sequence is there twice:
  once plain, and once with masks, at a ratio for each block. The rows of a block with masks see their block
  and the plain blocks before.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from jdllm.arrays import Tensor
from jdllm.errors import RequestError
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.visibility import key_ranges

SEQUENCES = 128
"""Sequences at most. Of more, some from all places of the texts are taken."""

LENGTH = 512
"""Tokens of a sequence at most."""

LEAST_TOKENS = 1024
"""Fewer tokens say too little of what a model sees."""

ROWS = 4 * LENGTH
"""Rows of a pack."""


class Pack(NamedTuple):
    """Sequences one behind another, and rows of padding, which see nothing.

    - `tokens`: ids.
    - `rows`: positions, and the range of rows whose keys each row sees.
    - `first`, `end`: a second range, which only the rows with masks of block models have.
    """

    tokens: Int32[Tensor, " rows"]
    rows: Rows
    first: Int32[Tensor, " rows"]
    end: Int32[Tensor, " rows"]


def packs_of(texts: Sequence[str], encode: Callable[[str], list[int]], config: ModelConfig) -> list[Pack]:
    """Cut texts into sequences, mask tokens, and pack the rows. The same texts give the same packs.

    Arguments:
    - `texts`: no sequence has tokens of two of them.
    - `encode`: returns the ids of a text.
    - `config`: the model, with the id of its mask unless it is causal.

    Raises `RequestError` for texts of too few tokens.
    """
    length = min(LENGTH, config.max_positions)
    whole = [np.array(encode(text), np.int32) for text in texts]
    if (total := sum(map(len, whole))) < LEAST_TOKENS:
        raise RequestError(f"the text to calibrate with has {total} tokens, expected at least {LEAST_TOKENS}")
    cut = [ids[start : start + length] for ids in whole for start in range(0, len(ids), length)]
    count = min(SEQUENCES, len(cut))
    kept = (cut[i * len(cut) // count] for i in range(count))
    sequences = (_seen(ids, config, np.random.default_rng(i)) for i, ids in enumerate(kept))
    return [_joined(some) for some in _batches(sequences)]


def _seen(ids: Int32[np.ndarray, " tokens"], config: ModelConfig, rng: np.random.Generator) -> Pack:
    """One sequence, as a model sees its tokens."""
    size, places, nothing = len(ids), np.arange(len(ids), dtype=np.int32), np.zeros_like(ids)
    rows = Rows(places, *key_ranges(config, 0, size))
    if config.in_order:
        return Pack(ids, rows, nothing, nothing)
    assert config.mask_id is not None
    block = config.block_length or size
    begin, ratios = places // block * block, 1 - rng.random(size)
    noisy = np.where(rng.random(size) < ratios[begin], np.int32(config.mask_id), ids)
    if config.block_length is None:
        return Pack(noisy, rows, nothing, nothing)
    own = Rows(places, size + begin, size + np.minimum(begin + block, size))
    twice = Rows(*map(np.concatenate, zip(rows, own, strict=True)))
    first, end = (np.concatenate([nothing, bound]) for bound in (nothing, begin))
    return Pack(np.concatenate([ids, noisy]), twice, first, end)


def _batches(sequences: Iterator[Pack]) -> Iterator[list[Pack]]:
    """Neighbouring sequences that one pack has room for."""
    batch: list[Pack] = []
    for sequence in sequences:
        if sum(len(one.tokens) for one in (*batch, sequence)) > ROWS:
            yield batch
            batch = []
        batch.append(sequence)
    yield batch


def _joined(sequences: list[Pack]) -> Pack:
    """Sequences as one pack."""
    packed, start = np.zeros((6, ROWS), np.int32), 0
    for tokens, (positions, *seen), *further in sequences:
        stop, bounds = start + len(tokens), np.stack([*seen, *further])
        packed[:, start:stop] = [tokens, positions, *(start + bounds)]
        start = stop
    tokens, positions, k_start, k_end, *further = packed
    return Pack(tokens, Rows(positions, k_start, k_end), *further)
