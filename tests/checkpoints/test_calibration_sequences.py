"""Texts as rows: what is masked, and what each row sees."""

import dataclasses

import numpy as np
import pytest

from jdllm.checkpoints.calibration.sequences import Pack, packs_of
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from tests.helpers import GOLDENS

MASK = 300


def config_of(family: str, **changes: object) -> ModelConfig:
    return dataclasses.replace(config_from_hf(GOLDENS / family), mask_id=MASK, **changes)


def encode(text: str) -> list[int]:
    return list(text.encode())


def text_of(count: int, seed: int = 0) -> str:
    return bytes(np.random.default_rng(seed).integers(97, 123, count).tolist()).decode()


def visible(pack: Pack) -> list[list[int]]:
    """The rows that each row sees."""
    bounds = zip(pack.rows.k_start, pack.rows.k_end, pack.first, pack.end, strict=True)
    return [[*range(a, b), *range(c, d)] for a, b, c, d in bounds]


def test_a_causal_model_sees_plain_text_in_pieces():
    """A text has two whole pieces and a rest. The three fit a pack, with padding behind them."""
    text = text_of(1100)
    (pack,) = packs_of([text], encode, config_of("llama"))
    np.testing.assert_array_equal(pack.tokens[:1100], encode(text))
    begins = [0] * 512 + [512] * 512 + [1024] * 76
    assert visible(pack)[:1100] == [list(range(begin, i + 1)) for i, begin in enumerate(begins)]
    assert not any(visible(pack)[1100:])
    np.testing.assert_array_equal(pack.rows.positions[:1100], [i - begin for i, begin in enumerate(begins)])


def test_each_sequence_of_a_model_that_denoises_has_a_ratio_of_masks():
    texts = [text_of(200, seed) for seed in range(100)]
    packs = packs_of(texts, encode, config_of("llada"))
    tokens = np.concatenate([pack.tokens[:2000] for pack in packs]).reshape(100, 200)
    plain = np.array([encode(text) for text in texts])
    masked = tokens == MASK
    np.testing.assert_array_equal(tokens[~masked], plain[~masked])
    ratios = np.sort(masked.mean(axis=1))
    # Uniform ratios: sorted, they rise evenly from 0 to 1.
    np.testing.assert_allclose(ratios, np.linspace(0, 1, 100), atol=0.15)
    assert len({row.tobytes() for row in masked}) == 100
    assert visible(packs[0])[:400] == [list(range(200))] * 200 + [list(range(200, 400))] * 200


@pytest.mark.parametrize(
    ("family", "before"),
    [
        ("sdar", lambda i: list(range(i // 4 * 4 + 4))),  # its block, and the blocks before
        ("nemotron_labs_diffusion", lambda i: list(range(i + 1))),  # the context of this model is causal
    ],
)
def test_a_block_model_sees_plain_blocks_and_one_with_masks(family, before):
    """A sequence is there twice. The copy with masks sees its own block, and the plain blocks before."""
    config, text = config_of(family, max_positions=40), text_of(1280)
    block = config.block_length
    assert block is not None
    packs = packs_of([text], encode, config)
    tokens = np.concatenate([pack.tokens[:2000] for pack in packs])[:2560].reshape(32, 2, 40)
    plain = np.array(encode(text)).reshape(32, 40)
    np.testing.assert_array_equal(tokens[:, 0], plain)
    masked = tokens[:, 1] == MASK
    np.testing.assert_array_equal(tokens[:, 1][~masked], plain[~masked])
    assert 0.4 < masked.mean() < 0.6
    ratios = masked.reshape(-1, block).mean(axis=1)
    assert (ratios == 0).any()
    assert (ratios == 1).any()
    seen = visible(packs[0])
    assert seen[:40] == [before(i) for i in range(40)]
    begins = [i // block * block for i in range(40)]
    assert [sorted(one) for one in seen[40:80]] == [
        [*range(begin), *range(40 + begin, 40 + begin + block)] for begin in begins
    ]
    np.testing.assert_array_equal(packs[0].rows.positions[:80], [*range(40), *range(40)])


def test_some_sequences_from_all_places_are_taken():
    """Of 512 sequences every fourth."""
    text = text_of(512 * 32)
    packs = packs_of([text], encode, config_of("llama", max_positions=32))
    kept = np.concatenate([pack.tokens for pack in packs]).reshape(-1, 32)
    np.testing.assert_array_equal(kept, np.array(encode(text)).reshape(-1, 32)[::4])


def test_the_same_texts_give_the_same_masks():
    first, second = (packs_of([text_of(3000)], encode, config_of("llada")) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)


def test_a_text_that_is_too_short():
    with pytest.raises(RequestError, match="has 1023 tokens, expected at least 1024"):
        packs_of([text_of(1000), text_of(23)], encode, config_of("llada"))
    packs_of([text_of(1000), text_of(24)], encode, config_of("llada"))
