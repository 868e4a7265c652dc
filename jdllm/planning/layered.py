"""What a sequence takes that runs layer by layer because its keys do not fit the KV pool.

While a prompt is read, the device holds its residual stream, the keys and values of two layers, one that is
computed and one that leaves for host memory, and those of the last layers as far as there is room. Behind the
prompt the residual stream is free: some layers come back, and the others pass through the device for every
token.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax.numpy as jnp

from jdllm.byte_sizes import format_bytes
from jdllm.decoding.cache_policies import policy_of
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.offload.layered import SEEN_AT_ONCE, Layering
from jdllm.models.config import ModelConfig
from jdllm.models.weights import layer_bytes
from jdllm.planning.account import Account
from jdllm.planning.buckets import power_bucket, row_bucket
from jdllm.planning.budget import Budget
from jdllm.planning.plan import row_ladder
from jdllm.planning.search import largest

CHUNKS = (8192, 4096, 2048, 1024, 512, 256, 128)
"""Rows of a layer that are computed at a time, the most first: below some thousand the weights are read too
often."""

CACHES = ("dual", "sparse", "head_sparse")
"""Cache policies whose requests run so where the KV pool cannot hold them."""

_IN_FLIGHT = 2
_LEAST_GENERATED = 16
_BLOCKS = 32 << 20
"""Bytes of scores, where no kernel keeps them in registers, and of small arrays."""

_ORDER_ARRAYS = 8
"""Arrays of four bytes for each candidate and key-value head, while the rows to keep are chosen: scores,
their maxima, and what is sorted."""


class Layered(NamedTuple):
    """A model, and the memory that it may use.

    - `config`, `dtype`: the model and the type of its weights.
    - `budget`: of device and host.
    - `weights`: bytes of the device, the weights of other models included.
    - `steps`: bytes that steps of others may need, which run between two layers.
    - `retention`: share of the rows whose keys a refresh keeps, chosen layer by layer; `None` for all rows.
    """

    config: ModelConfig
    dtype: str
    budget: Budget
    weights: int
    steps: int = 0
    retention: float | None = None

    @classmethod
    def of_account(
        cls, config: ModelConfig, dtype: str, account: Account, retention: float | None = None
    ) -> "Layered | None":
        """That of an engine; `None` where it has no budget, and on several cards.

        Steps of others run between the layers of a sequence that denoises. Beside a causal one nothing runs.
        """
        if account.budget is None or config.cards > 1:
            return None
        budget, weights = account.budget, account.weights + account.verifier
        beside_pool = budget.beside(weights + account.pool_bytes).device
        budget = dataclasses.replace(budget, host=budget.host - account.streamed)
        return cls(config, dtype, budget, weights, 0 if config.in_order else beside_pool, retention)

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    def keys_bytes(self, rows: int) -> int:
        """Bytes of the keys and values of one layer."""
        return 2 * rows * self.config.num_kv_heads * self.config.head_dim * self.itemsize

    def stored_rows(self, rows: int) -> int:
        """Rows of the arrays for what is kept of so many rows."""
        return rows if self.retention is None else min(rows, row_bucket(max(1, int(rows * self.retention))))

    def fixed(self, temporaries: int, generated: int) -> int:
        """Bytes of the device that do not grow with the prompt."""
        behind = self.config.num_layers * self.keys_bytes(_generated_rows(generated))
        return self.budget.overhead + self.weights + behind + temporaries

    def reading(self, rows: int, chunk: int, generated: int) -> int:
        """Bytes of the device while a prompt in so many rows is read, and no layer's keys stay."""
        stream = rows * self.config.hidden_size * self.itemsize
        growing = stream + _IN_FLIGHT * self.keys_bytes(self.stored_rows(rows))
        return self.fixed(self.temporaries(chunk, rows), generated) + growing

    def temporaries(self, chunk: int, rows: int = 0) -> int:
        """Bytes that the executable of a layer needs beside its arguments and results: a copy of the
        layer's weights, and the rows of a chunk on their way. Where a layer keeps some of so many rows, the
        keys of all of them too, and what chooses among them."""
        config = self.config
        heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        in_f32 = 2 * (4 * config.head_dim + 2 * config.num_heads)  # rotations, and sums of attention
        widths = 4 * config.hidden_size + heads + in_f32 + 2 * config.intermediate_size
        needed = layer_bytes(config, self.dtype, 0) + chunk * widths * self.itemsize + _BLOCKS
        if self.retention is not None:
            scores = 4 * rows * (_ORDER_ARRAYS * config.num_kv_heads + config.num_heads)
            needed += self.keys_bytes(rows) + scores
        return max(needed, self.steps)

    def generating(self, rows: int) -> int:
        """The same for a layer of a generated row behind a prompt in so many rows, or of a block within them.

        One row multiplies with weights where they are; for a block they are copied.
        """
        if self.config.in_order:
            return self.keys_bytes(min(rows, SEEN_AT_ONCE)) + _BLOCKS
        return self.temporaries(CHUNKS[-1])


class LayeredPlan(NamedTuple):
    """A sequence and the memory that it takes.

    - `prompt`: its tokens before the first one that is generated.
    - `layering`: how it is run.
    - `prompt_bytes`, `token_bytes`: of the device at the worst moment while the prompt is read, and while
      tokens are generated, everything included.
    - `temporaries`: of the former, for the executable of a layer.
    - `host_bytes`: of pinned host memory, which as many move to while the prompt is read.
    - `back_bytes`, `streamed_bytes`: keys and values that move back behind it, and that pass through the
      device for each token.
    """

    prompt: int
    layering: Layering
    prompt_bytes: int
    token_bytes: int
    temporaries: int
    host_bytes: int
    back_bytes: int
    streamed_bytes: int


def retention_of(sampling: SamplingParams) -> float | None:
    """The `retention` of `Layered` for requests with these parameters."""
    policy = policy_of(sampling)
    return sampling.effective("retention") if policy is not None and policy.scored else None


def plan_layered(model: Layered, prompt: int, generated: int) -> LayeredPlan | None:
    """The plan with the largest chunks that fit; `None` where none fits.

    Arguments:
    - `model`: which one, and where.
    - `prompt`: tokens, at least 1; `generated`: at most so many follow.
    """
    plans = (_plan(model, prompt, generated, chunk) for chunk in _chunks(prompt))
    return next((plan for plan in plans if plan is not None), None)


@functools.lru_cache(maxsize=16)
def longest_layered(model: Layered, generated: int) -> int:
    """The longest prompt that has a plan with so many tokens behind it; 0 where none has."""
    return largest(lambda rows: plan_layered(model, rows, generated) is not None, row_ladder()) or 0


def missing(model: Layered, prompt: int, generated: int) -> str:
    """What a sequence without a plan would need at least of the device, and of device and host together."""
    rows = _rows(prompt, CHUNKS[-1])
    keys = model.keys_bytes(rows)
    device = model.reading(rows, CHUNKS[-1], generated)
    return (
        f"{format_bytes(device, math.ceil)} of the device, weights included, and beside that"
        f" {format_bytes(model.config.num_layers * keys, math.ceil)} of device and host memory for keys and"
        " values"
    )


def _plan(model: Layered, prompt: int, generated: int, chunk: int) -> LayeredPlan | None:
    rows, layers, room = _rows(prompt, chunk), model.config.num_layers, model.budget.device
    stored = model.stored_rows(rows)
    keys = model.keys_bytes(stored)
    reading = model.reading(rows, chunk, generated)
    kept = min(layers, (room - reading) // keys)
    away = layers - kept
    if kept < 0 or away * keys > model.budget.host:
        return None
    behind = model.fixed(model.generating(stored), generated)
    whole = behind + layers * keys <= room
    behind += 0 if whole else _IN_FLIGHT * keys
    kept_behind = layers if whole else min(layers, (room - behind) // keys)
    if kept_behind < kept:
        return None
    return LayeredPlan(
        prompt=prompt,
        layering=Layering(rows, chunk, _generated_rows(generated), kept, kept_behind, stored),
        prompt_bytes=reading + kept * keys,
        token_bytes=behind + kept_behind * keys,
        temporaries=model.temporaries(chunk, rows),
        host_bytes=away * keys,
        back_bytes=(kept_behind - kept) * keys,
        streamed_bytes=(layers - kept_behind) * keys,
    )


def _chunks(prompt: int) -> list[int]:
    """Chunks of which a prompt fills one."""
    return [chunk for chunk in CHUNKS if chunk <= max(prompt, CHUNKS[-1])]


def _rows(prompt: int, chunk: int) -> int:
    """A compiled number of rows, in whole chunks."""
    return -(-row_bucket(prompt) // chunk) * chunk


def _generated_rows(generated: int) -> int:
    """Rows of the arrays for tokens behind a prompt."""
    return power_bucket(generated, _LEAST_GENERATED)
