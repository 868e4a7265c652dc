"""Questions that meet the sizes of the stages of a long context, so that later ones find them compiled."""

from collections.abc import Callable, Iterator

import numpy as np

from jdllm.models.config import ModelConfig
from jdllm.serving.long.request import LongContext, LongSpec

INSTRUCTION, QUERY, ANSWER = 128, 64, 32


def warm_questions(
    make: Callable[[LongContext], LongSpec], config: ModelConfig, rows: int
) -> Iterator[LongSpec]:
    """Questions over contexts of random ids, to be asked one after another.

    They come in pairs, of which the second finds its chunks stored. The longest context has as many chunks as
    one evaluation scores, each one before it half as many: what is compiled for one would stand in for
    smaller ones that come later. There is no instruction, beside which fewer chunks would be scored at a
    time; the last question has one, beside all chunks that are kept.

    Arguments:
    - `make`: what a question asks for. Raises `RequestError` where the model cannot answer it.
    - `rows`: packed rows of one evaluation.
    """
    rng = np.random.default_rng(0)
    ids = np.delete(np.arange(config.defined_ids), config.mask_id or 0)

    def asked(instruction: int, context: np.ndarray) -> LongSpec:
        query = rng.choice(ids, QUERY)
        return make(LongContext(rng.choice(ids, instruction), context, query, query))

    one = asked(0, ids[:1])
    length, kept = one.prefilling.chunk_length, one.prefilling.chunks_kept + one.prefilling.keep_first_chunk
    most = max(1, rows // (length + one.behind))
    for halvings in reversed(range(most.bit_length())):
        context = rng.choice(ids, length * -(-most >> halvings))
        yield asked(0, context)
        yield asked(0, context)
    yield asked(INSTRUCTION, rng.choice(ids, length * kept))
