"""The one transformer: packed rows in, hidden rows out.

Every array has a flat row axis that holds the rows of all segments one after another; which keys a row
attends to is its range [k_start, k_end) of rows. Nothing here knows about batches or padding.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jdllm.arrays import Tensor
from jdllm.chunks import UNCUT, ChunkConfig
from jdllm.execution.arriving import arrived
from jdllm.execution.chunked import run_layers
from jdllm.execution.few_rows.streamed import streamed_of
from jdllm.layers import rms_norm
from jdllm.models import leaf
from jdllm.models.block import Hidden, RowInts, Rows
from jdllm.models.cards import ADDRESSES, joined_rows
from jdllm.models.config import ModelConfig
from jdllm.models.layer import AttentionFn, KeysValues, Layer, LayerNumber, Ranges, Weights
from jdllm.models.moe import experts_of
from jdllm.models.rotary import rotation_at
from jdllm.models.weights import HOST_LAYERS, Params, head_weights, layer_runs
from jdllm.models.whole_layers import WHOLE, WholeLayers
from jdllm.pallas.attention import attention as default_attention
from jdllm.pallas.attention.ranges import ranges_of

_UNROLLED = 4  # layers of few rows: the start of a turn would be a fiftieth of a layer


class Wanted(NamedTuple):
    """Rows whose hidden states are wanted, and which of them really are; the others may hold anything."""

    rows: Int[Tensor, " wanted"]
    live: Bool[Tensor, " wanted"]


def forward(
    params: Params, config: ModelConfig, tokens: RowInts, rows: Rows, *, chunks: ChunkConfig = UNCUT
) -> Hidden:
    """Run all layers over packed rows.

    Arguments:
    - `params`: weights as `jdllm.models.weights.spec_tree` describes them.
    - `config`: the model; static.
    - `tokens`: int32 ids of all rows.
    - `rows`: positions and key ranges; `jdllm.models.visibility.key_ranges` gives the ranges of one sequence.
    - `chunks`: chunk counts; static.

    Returns the hidden rows after the last layer, before the final norm, in the dtype of the weights.
    """
    dealt = dealt_rows(params, rows) if chunks.layers_whole else None
    if dealt is not None:
        h = dealt.whole.dealt(embed(params, tokens))
        return dealt.joined(dealt.scan(h, lambda h, layer: layer.apply(h, dealt.own)[0]))
    return apply_layers(params, config, embed(params, tokens), rows, chunks=chunks)


def apply_layers(
    params: Params,
    config: ModelConfig,
    h: Hidden,
    rows: Rows,
    *,
    chunks: ChunkConfig = UNCUT,
    attention: AttentionFn | None = None,
) -> Hidden:
    """`forward` from the embedded rows `h` on; of `params` the layers are read.

    Arguments:
    - `attention`: of whole layers, with the contract of `jdllm.pallas.attention.attention`, which is the
      default.
    """
    if not chunks.layers_whole:
        return run_layers(params, config, h, rows, chunks)
    sees = packed_ranges(config, rows, attention)
    return scan_layers(params, config, h, lambda h, layer: layer.apply(h, sees)[0])


def forward_wanted(
    params: Params, config: ModelConfig, tokens: RowInts, rows: Rows, wanted: Wanted
) -> Hidden:
    """`forward` for the wanted rows: for other rows the last layer makes keys and values only.

    Arguments:
    - `params`, `config`: stacked weights, and the model; the latter is static.
    - `tokens`, `rows`: int32 ids, and positions and key ranges, of all rows.
    - `wanted`: the rows to return.

    Returns the hidden rows of `wanted`, in its order.
    """
    dealt = dealt_rows(params, rows, wanted)
    if dealt is not None:
        return _forward_wanted_dealt(dealt, dealt.whole.dealt(embed(params, tokens)), wanted)
    sees = packed_ranges(config, rows)

    def last(h: Hidden, layer: Layer) -> Hidden:
        k, v = layer.project(h, sees.rotation, ("k", "v"))
        return layer.apply(h[wanted.rows], ranges_of_wanted(sees, wanted, (k, v)))[0]

    return scan_layers(
        params, config, embed(params, tokens), lambda h, layer: layer.apply(h, sees)[0], last=last
    )


def _forward_wanted_dealt(dealt: "DealtRows", h: Hidden, wanted: Wanted) -> Hidden:
    def last(h: Hidden, layer: Layer) -> Hidden:
        k, v = layer.project(h, dealt.own.rotation, ("k", "v"))
        return dealt.last(layer, h, wanted, dealt.own.of_all_cards(layer, k, v))

    return dealt.joined(dealt.scan(h, lambda h, layer: layer.apply(h, dealt.own)[0], last=last))


class DealtRows(NamedTuple):
    """Packed rows of a step that cards with whole layers deal out.

    - `whole`: the layers; `layers`: as they are applied.
    - `sees`: what all rows see of each other.
    - `own`: what the rows of this card see of all rows.
    """

    whole: WholeLayers
    layers: Params
    sees: Ranges
    own: Ranges

    def scan[Carry](
        self,
        carry: Carry,
        body: Callable[[Carry, Layer], Carry],
        *,
        last: Callable[[Carry, Layer], Carry] | None = None,
    ) -> Carry:
        """`scan_layers`, on the rows of this card."""
        return scan_layers(self.layers, self.whole.config, carry, body, last=last)

    def last(self, layer: Layer, h: Hidden, wanted: Wanted, keys_values: KeysValues) -> Hidden:
        """This card's part of the wanted rows after the last layer.

        Arguments:
        - `h`: the rows of this card.
        - `keys_values`: of all rows.
        """
        mine = Wanted(*(self.whole.dealt(jnp.asarray(x)) for x in wanted))
        return layer.apply(self.joined(h)[mine.rows], ranges_of_wanted(self.sees, mine, keys_values))[0]

    def joined(self, h: Hidden) -> Hidden:
        """The rows of all cards."""
        return joined_rows(h, self.whole.cards, self.layers.get(ADDRESSES))


def dealt_rows(params: Params, rows: Rows, wanted: Wanted | None = None) -> DealtRows | None:
    """How cards with whole layers deal out a step; `None` where each card evaluates all rows.

    Arguments:
    - `rows`: positions and key ranges of all rows.
    - `wanted`: the rows to return, where these are some.
    """
    whole: WholeLayers | None = params.get(WHOLE)
    count = len(rows.positions)
    if whole is None or not whole.takes(count, 0 if wanted is None else len(wanted.rows)):
        return None
    layers = whole.stacks | {name: x for name, x in params.items() if name == ADDRESSES}
    sees = packed_ranges(whole.config, rows)
    own, rotation = jax.tree.map(whole.dealt, (Rows(*map(jnp.asarray, rows)), sees.rotation))
    return DealtRows(
        whole, layers, sees, Ranges(own, rotation, attention_over(own, count), cards=whole.cards)
    )


def packed_ranges(config: ModelConfig, rows: Rows, attention: AttentionFn | None = None) -> Ranges:
    """What packed rows see of each other, the same in all layers.

    Arguments:
    - `attention`: the default one where it is `None`.
    """
    rotation = rotation_at(config.rope, config.head_dim, rows.positions)
    return Ranges(rows, rotation, attention or attention_over(rows, rows.k_start.shape[0]))


def ranges_of_wanted(sees: Ranges, wanted: Wanted, keys_values: KeysValues) -> Ranges:
    """What the rows of `wanted` see of the keys and values of all rows."""
    rows = Rows(*(jnp.asarray(x)[wanted.rows] for x in sees.rows))
    rows = rows._replace(k_end=jnp.where(wanted.live, rows.k_end, rows.k_start))
    rotation = jax.tree.map(lambda x: x[wanted.rows], sees.rotation)
    return Ranges(rows, rotation, attention_over(rows, keys_values[0].shape[0]), keys_values)


def attention_over(rows: Rows, keys: int) -> AttentionFn:
    """The default attention, for layers that all have the key ranges of `rows`, among so many keys."""
    return functools.partial(default_attention, ranges=ranges_of(rows.k_start, rows.k_end, keys))


def scan_layers[Carry](
    params: Params,
    config: ModelConfig,
    carry: Carry,
    body: Callable[[Carry, Layer], Carry],
    *,
    few_rows: int | None = None,
    last: Callable[[Carry, Layer], Carry] | None = None,
) -> Carry:
    """Apply `body(carry, layer)` for every layer in order: a device loop for each run of like layers.

    Arguments:
    - `few_rows`: how many rows the layers are applied to, where that may be so few that a kernel streams
      their weights (`jdllm.execution.few_rows.streamed`).
    - `last`: for the last layer, in place of `body`.

    XLA's products read a layer's weights where they lie in their stack. Of layers in host memory, which are
    the last ones, the next arrives while one is computed.
    """
    before = 0
    for name, start, end in layer_runs(config):
        if name == HOST_LAYERS:
            return _scan_arriving(params, config, before, carry, body, last or body, few_rows)
        step = _stepping(params, config, params[name], before - start, few_rows)
        like = end - (last is not None and before + end - start == config.num_layers)
        unroll = 1 if few_rows is None else min(_UNROLLED, like - start)
        apply = functools.partial(step, body)
        carry = lax.fori_loop(start, like, apply, carry, unroll=unroll)
        if like < end:
            assert last is not None
            carry = step(last, jnp.int32(like), carry)
        before += end - start
    return carry


def _scan_arriving[Carry](
    params: Params,
    config: ModelConfig,
    before: int,
    carry: Carry,
    body: Callable[[Carry, Layer], Carry],
    last: Callable[[Carry, Layer], Carry],
    few_rows: int | None,
) -> Carry:
    """The layers in host memory, in order: behind `before` layers, `last` for the last of all."""
    stack = params[HOST_LAYERS]

    def apply(
        body: Callable[[Carry, Layer], Carry], place: LayerNumber, carry: Carry, here: dict[str, Any]
    ) -> Carry:
        step = _stepping(params, config, here, before + place, few_rows)
        return step(body, jnp.int32(0), carry)

    def turn(place: Array, both: tuple[Carry, dict[str, Any]]) -> tuple[Carry, dict[str, Any]]:
        carry, here = both
        return apply(body, place, carry, here), arrived(stack, place + 1)

    final = config.offloaded - 1
    carry, here = lax.fori_loop(0, final, turn, (carry, arrived(stack, 0)))
    return apply(last, final, carry, here)


def scan_some_layers[Carry](
    params: Params,
    config: ModelConfig,
    first: Int[Tensor, ""] | int,
    count: int,
    carry: Carry,
    body: Callable[[Carry, Layer], Carry],
    *,
    last: Callable[[Carry, Layer], Carry] | None = None,
) -> Carry:
    """`scan_layers` for `count` layers from `first` on, of a model whose layers are all alike.

    Arguments:
    - `first`: may be known on the device only. The number of turns is known beforehand, so the host need not
      wait for the device.
    - `last`: for the last of these layers, in place of `body`.
    """
    ((name, _, _),) = layer_runs(config)
    step, like = _stepping(params, config, params[name], 0, None), count - (last is not None)
    carry = lax.fori_loop(0, like, lambda i, carry: step(body, first + i, carry), carry)
    return carry if last is None else step(last, jnp.int32(first + like), carry)


def _stepping(
    params: Params, config: ModelConfig, stack: Weights, offset: LayerNumber, few_rows: int | None
) -> Callable[..., Any]:
    """What applies a body to a carry at a place of a stack.

    Arguments:
    - `stack`: like layers, on the device.
    - `offset`: what is added to a place for the number of its layer.
    - `few_rows`: how many rows the layers are applied to, `None` where they are many.
    """
    stack = dict(stack)
    experts = experts_of(stack)
    streamed = None if few_rows is None else streamed_of(stack, few_rows)
    wholes = {name: x for name, x in (("experts", experts), ("streamed", streamed)) if x is not None}
    exchanged = {name: x for name, x in params.items() if name == ADDRESSES}

    def step[Carry](body: Callable[[Carry, Layer], Carry], place: Array, carry: Carry) -> Carry:
        weights = {name: leaf.of_layer(weight, place) for name, weight in stack.items()}
        weights |= {name: whole.of_layer(place) for name, whole in wholes.items()} | exchanged
        return body(carry, Layer(weights, config, place + offset))

    return step


def embed(params: Params, tokens: RowInts) -> Hidden:
    """Look up the token embeddings."""
    return leaf.rows(params["embed"], tokens)


def final_norm(params: Params, config: ModelConfig, h: Hidden) -> Hidden:
    """The norm before the head."""
    return rms_norm(h, params["final_norm"], config.rms_norm_eps)


def logits(params: Params, config: ModelConfig, h: Hidden) -> Float[Array, "rows vocab"]:
    """f32 logits of the given hidden rows; pass only the rows that need them."""
    return leaf.logits(final_norm(params, config, h), head_weights(params))
