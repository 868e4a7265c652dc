"""How likelihoods are estimated, and what each kind of model takes of it."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jdllm.arguments import positive
from jdllm.block_scoring import BlockPair, drawn, in_blocks
from jdllm.decoding.likelihood import perturb
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig
from jdllm.scoring import MaskedPair
from jdllm.serving.blocks.request import block_length_of

Pair = tuple[np.ndarray, np.ndarray]
"""Int32 ids of a prompt and of an answer."""


class MonteCarlo(NamedTuple):
    """How a likelihood is estimated.

    - `mc_num`: masked copies of the answer to average over.
    - `batch_size`: copies in which the number of masks is stratified.
    - `cfg_scale`: classifier-free guidance.
    - `seed`: of the masks.
    - `block_length`: positions of a block of a block model; `None` for those that the model has.
    """

    mc_num: int = 128
    batch_size: int = 16
    cfg_scale: float = 0.0
    seed: int = 0
    block_length: int | None = None


_EXACT = "masks nothing to score an answer"
_OF_MASKS = {
    "mc_num": _EXACT,
    "batch_size": _EXACT,
    "cfg_scale": "has no classifier-free guidance",
    "seed": _EXACT,
    "block_length": "has no blocks to score an answer",
}
"""Fields of `MonteCarlo`, and why a model that is scored in order does not have them."""


def check_exact(settings: MonteCarlo, config: ModelConfig) -> None:
    """Raise `RequestError` for settings of an estimate; of a model whose likelihoods are exact."""
    whose = "a causal model" if config.in_order else f"a {config.family} model is scored as a causal one, and"
    for name, why in _OF_MASKS.items():
        if getattr(settings, name) != MonteCarlo._field_defaults[name]:
            raise RequestError(f"{name} is for models that denoise: {whose} {why}")


def masked_pairs(pairs: Sequence[Pair], settings: MonteCarlo) -> list[MaskedPair]:
    """Pairs for a model that sees whole sequences, with their masks.

    Raises `RequestError` for settings that are no numbers of their kind, and for a `block_length`.
    """
    checked = _checked(settings)
    if settings.block_length is not None:
        raise RequestError("block_length is for block models: this model scores an answer as a whole")
    masks = functools.cache(lambda length: perturb(length, *checked, settings.seed))
    return [MaskedPair(*pair, masks(len(pair[1]))) for pair in pairs]


def block_pairs(
    pairs: Sequence[Pair], settings: MonteCarlo, config: ModelConfig, mask_id: int
) -> list[BlockPair]:
    """Pairs for a block model, with the masks of each block of an answer.

    Raises `RequestError` for settings that are no numbers of their kind, for a `block_length` that is no
    divisor of a page, and with `cfg_scale`.
    """
    checked = _checked(settings)
    if settings.cfg_scale:
        raise RequestError(
            "cfg_scale is for models that see whole sequences: leave it at 0 for a block model"
        )
    length = block_length_of(settings.block_length, config)
    draws = functools.cache(lambda count, block: drawn(perturb(count, *checked, [settings.seed, block])))
    return [in_blocks(*pair, length, mask_id, draws) for pair in pairs]


def _checked(settings: MonteCarlo) -> tuple[int, int]:
    """Copies, and copies in a batch."""
    mc_num = positive("mc_num", settings.mc_num, RequestError)
    batch_size = positive("batch_size", settings.batch_size, RequestError)
    # Refuses what a generation would refuse; there, -1 is no seed.
    SamplingParams(cfg_scale=settings.cfg_scale, seed=settings.seed)
    if settings.seed == -1:
        raise RequestError(f"seed is -1, expected an integer from 0 to {2**64 - 1}")
    return mc_num, min(batch_size, mc_num)
