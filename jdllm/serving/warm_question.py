"""Questions that meet the sizes of the stages of a long context, so that later ones find them compiled."""

from collections.abc import Iterator

import numpy as np

from jdllm.decoding.prefilling import Prefilling
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.planning.account import Account
from jdllm.serving.long_request import LongContext, LongSpec, long_spec

INSTRUCTION, QUERY, ANSWER = 128, 64, 32


def warm_questions(
    prefilling: Prefilling, config: ModelConfig, account: Account, bos_id: int | None
) -> Iterator[LongSpec]:
    """Questions over contexts of random ids, to be asked one after another.

    They come in pairs, of which the second finds its chunks stored. The longest context has as many chunks as
    one evaluation scores, each one before it half as many: what is compiled for one would stand in for
    smaller ones that come later. There is no instruction, beside which fewer chunks would be scored at a
    time; the last question has one, beside all chunks that are kept.

    Arguments:
    - `bos_id`: as of `jdllm.serving.long_request.long_spec`.

    Raises `RequestError` as `long_spec` does.
    """
    rng = np.random.default_rng(0)
    ids = np.delete(np.arange(config.defined_ids), config.mask_id or 0)
    sampling = SamplingParams(gen_length=ANSWER, block_length=ANSWER, early_stop=False, prefilling=prefilling)

    def asked(instruction: int, context: np.ndarray) -> LongSpec:
        query = rng.choice(ids, QUERY)
        long = LongContext(rng.choice(ids, instruction), context, query, query)
        return long_spec(long, sampling, config, bos_id)

    behind = QUERY + (prefilling.draft_length if prefilling.score == "draft" else 0)
    each = prefilling.chunk_length + behind * (1 if config.logits_shift else 2)
    most = max(1, min(account.rows, account.max_refresh) // each)
    for halvings in reversed(range(most.bit_length())):
        context = rng.choice(ids, prefilling.chunk_length * -(-most >> halvings))
        yield asked(0, context)
        yield asked(0, context)
    kept = prefilling.chunks_kept + prefilling.keep_first_chunk
    yield asked(INSTRUCTION, rng.choice(ids, prefilling.chunk_length * kept))
