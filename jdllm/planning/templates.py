"""The graph template of a denoising step: what XLA keeps for each operator of the transformer.

Two layers and the head stand for the whole step, because every layer needs the same. Which tensors share
memory, and what a matrix product needs beside its result, is as XLA has it (`tests/aot/test_plan.py`).
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdllm.chunks import TILE
from jdllm.decoding.head_decision import GATHERED_ROWS
from jdllm.models.config import ModelConfig, MoeConfig
from jdllm.models.weights import quantised_struct
from jdllm.pallas.attention.limits import ATTENTION
from jdllm.pallas.device import Target
from jdllm.pallas.dispatch import Form
from jdllm.pallas.grouped_matmul.limits import operator_for
from jdllm.pallas.masked_logits import LISTED, Level
from jdllm.pallas.masked_logits.limits import FUSED_UNIT, default_call
from jdllm.pallas.quantised_matmul.limits import MOST_ROWS, QUANTISED_MATMUL
from jdllm.planning.graph import GraphTemplate, Size, ceil_div, dim, maximum, minimum

LAYERS = 2
_LAYER_COUNTS = ("ffn", "query", "kv", "heads")
"""Where any of these is above 1, all operators of a layer run in loops."""

_FLOAT8_CAPABILITY = 8.9
"""Cards from this compute capability on multiply floats of 8 bits."""

WORKSPACE = 32 << 20
"""Bytes that cuBLAS asks for beside a product; XLA allots them like any tensor."""
_LOGITS = {Level.TOP: 2.0, Level.MOMENTS: 2.0, Level.FILTERED: 7.1}
"""f32 arrays of head rows x vocabulary alive at once: before and after the bans, or around a sort. Of those 7
the sort takes 4 for itself on a card, of which a compiler without a card knows nothing."""


class StepKind(NamedTuple):
    """What decides the shape of a step's graph, beside the model.

    - `itemsize`: bytes of a number in weights and activations.
    - `device`: of the model; its forms of operators decide which arrays exist in memory.
    - `level`: what the head computes for a row.
    """

    itemsize: int
    device: Target
    level: Level = Level.TOP


def attention_form(config: ModelConfig, dtype: str, device: Target) -> Form[int]:
    """The form of packed attention that a model's steps take.

    Arguments:
    - `dtype`: of weights and activations.
    """
    q = jax.ShapeDtypeStruct((1, config.num_heads, config.head_dim), dtype)
    return ATTENTION.default(device, q, config.head_dim**-0.5)


@functools.lru_cache(maxsize=64)
def step_template(config: ModelConfig, kind: StepKind) -> GraphTemplate:
    """The template of one model's step, over the dimensions T (packed rows), M (head rows) and the counts.

    Arguments:
    - `config`: the model; only its sizes matter.
    - `kind`: as `StepKind` says.
    """
    graph = GraphTemplate(config.family)
    rows = dim("T")
    graph.add_input("row integers", rows * 16, keep=True)
    graph.add_op("embed", outputs={"h": rows * (config.hidden_size * kind.itemsize)})
    for layer in range(LAYERS):
        _add_attention(graph, config, kind, f"layer {layer}")
        dense = config.moe is None or (layer == 0 and bool(config.moe.dense_layers))
        added = _added_apart(config, kind, f"layer {layer}")
        add_feed_forward(graph, config, kind, f"layer {layer}", _chunk(dim("T"), "ffn"), dense, added)
    add_head(graph, config, kind, "h")
    return graph


def _scratch(config: ModelConfig, kind: StepKind, outputs: int, rows: Size | int) -> Size | int:
    """Bytes that a product of a layer needs beside its result.

    Arguments:
    - `outputs`: numbers of its weight for each number of a hidden row.
    - `rows`: of the product. XLA widens a quantised weight first. A kernel for fewer rows does not. Floats of
      8 bits are widened, and rounded rows with them, on cards without tensor cores for these.
    """
    if config.quantization is None:
        return WORKSPACE
    numbers = outputs * config.hidden_size
    if _rounds_rows(config, kind):
        if not _multiplies_float8(kind):
            return WORKSPACE + numbers * kind.itemsize + rows * (config.hidden_size * (kind.itemsize + 1))
        # Loops copy the weight, and keep the rounded rows.
        return WORKSPACE + (rows * config.hidden_size + numbers) * _in_loop(rows)
    row = jax.ShapeDtypeStruct((1, config.hidden_size), _dtype(kind))
    forms = (
        QUANTISED_MATMUL.default(kind.device, row, quantised_struct((1, *sides), form))
        for form in config.forms
        for sides in itertools.permutations((outputs, config.hidden_size))
    )
    widened: Size | int = numbers * kind.itemsize
    if all(form.language != "xla" for form in forms):
        widened = minimum(maximum(rows + -MOST_ROWS, 0), 1) * widened
    return widened + WORKSPACE


def _rounds_rows(config: ModelConfig, kind: StepKind) -> bool:
    """Whether products take rows of 8 bits."""
    return config.quantization == "fp8" and kind.itemsize == 2


def _multiplies_float8(kind: StepKind) -> bool:
    """Whether the device multiplies floats of 8 bits. One of unknown capability is taken to do so."""
    return kind.device.capability is None or kind.device.capability >= _FLOAT8_CAPABILITY


def _chunk(rows: Size, count: str) -> Size:
    """Rows of a chunk, as `jdllm.chunks.chunk_rows` cuts them."""
    at_least = 1 + _cut(*_LAYER_COUNTS)
    return minimum(rows, ceil_div(ceil_div(rows, maximum(dim(count), at_least)), TILE) * TILE)


def _in_loop(part: Size | int) -> Size | int:
    """1 where operators on so many rows run in loops, else 0: a step that is not cut has a number of rows."""
    return _cut(*_LAYER_COUNTS) if isinstance(part, Size) else 0


def _cut(*counts: str) -> Size:
    """1 where any of these counts is above 1, else 0."""
    most: Size = dim(counts[0])
    for count in counts[1:]:
        most = maximum(most, dim(count))
    return minimum(most + -1, 1)


def _add_attention(graph: GraphTemplate, config: ModelConfig, kind: StepKind, layer: str) -> None:
    rows, groups = dim("T"), dim("heads")
    hidden = config.hidden_size * kind.itemsize
    q_width, kv_width = (n * config.head_dim * kind.itemsize for n in (config.num_heads, config.num_kv_heads))
    angles = 2 * 4 * (config.rope.rotated_dim(config.head_dim) // 2)
    part = _chunk(rows, "kv")
    kv_scratch = _scratch(config, kind, kv_width // kind.itemsize, part)
    store, linear = ceil_div(rows * kv_width, groups), ceil_div(part * kv_width, groups)
    names = {name: f"{layer} {name}" for name in ("k", "v", "x for k v", "linear k", "attended")}
    cut = ("kv", "heads")

    attended = rows * q_width * _cut("heads")
    graph.add_op(
        f"{layer} norm for k v",
        ["h"],
        {names["x for k v"]: part * hidden, names["attended"]: attended},
        owners=cut,
    )
    graph.add_op(
        f"{layer} project k", [names["x for k v"]], {names["linear k"]: linear}, kv_scratch, owners=cut
    )
    graph.add_op(
        f"{layer} rotate k",
        [names["linear k"]],
        {names["k"]: store, f"{layer} angles for k": part * angles},
        owners=cut,
    )
    # In a loop XLA copies a chunk of h before the norm. For q the copy counts only where heads are in groups:
    # otherwise queries and attended rows take more, later.
    graph.add_op(
        f"{layer} project v",
        [names["x for k v"]],
        {names["v"]: store},
        maximum(linear + kv_scratch, part * hidden * _in_loop(part)) + part * angles * _in_loop(part),
        owners=cut,
    )

    part = _chunk(rows, "query")
    q_scratch = _scratch(config, kind, q_width // kind.itemsize, part)
    width = ceil_div(part * q_width, groups)
    cut = ("query", "heads")
    x, linear_q, q, o = (f"{layer} {name}" for name in ("x for q", "linear q", "q", "o"))
    graph.add_op(f"{layer} norm for q", ["h"], {x: part * hidden}, part * hidden * _cut("heads"), owners=cut)
    graph.add_op(f"{layer} project q", [x], {linear_q: width}, q_scratch, owners=cut)
    graph.add_op(
        f"{layer} rotate q",
        [linear_q],
        {q: width, f"{layer} angles for q": part * angles},
        owners=cut,
    )
    residuals = ceil_div(part * (2 * 4 * config.num_heads), groups)
    scored = attention_form(config, _dtype(kind).name, kind.device).workspace or 0
    tile = minimum(part, scored) * minimum(rows, scored)
    tiles = ceil_div(tile * (2 * 4 * config.num_heads), groups)
    graph.add_op(f"{layer} attention", [q, names["k"], names["v"]], {o: width}, residuals + tiles, owners=cut)
    graph.add_barrier(f"{layer} last group", [names["k"], names["v"], o])
    inputs, apart = [o, names["attended"]], _added_apart(config, kind, layer)
    if config.cards == 1:
        whole = rows * hidden * (_cut(*_LAYER_COUNTS) * -1 + 1)  # a loop adds its chunks in place
        added = dict.fromkeys(apart, whole)
        graph.add_op(f"{layer} project o", [*inputs, "h"], added, q_scratch, owners=cut)
        return
    # The sum over cards is added to h behind the feed-forward layer.
    graph.add_op(f"{layer} project o", inputs, {f"{layer} o of card": part * hidden}, q_scratch, owners=cut)
    added = dict.fromkeys(apart, part * hidden)
    graph.add_op(f"{layer} sum o", [f"{layer} o of card"], added, owners=cut)


def add_feed_forward(
    graph: GraphTemplate,
    config: ModelConfig,
    kind: StepKind,
    layer: str,
    part: Size | int,
    dense: bool,
    added: Sequence[str] = (),
) -> None:
    """Operators of one layer's feed-forward branch for a chunk of `part` rows of "h", dense or by experts.

    The results of operators before, named `added`, are added to "h" in the end. A symbolic `part` is a chunk
    of a device loop, whose buffers XLA places with a gap of a chunk of experts' inputs, and up to a workspace
    more where one kernel makes the gated product.
    """
    x, hidden = f"{layer} x", part * (config.hidden_size * kind.itemsize)
    graph.add_op(f"{layer} norm", ["h"], {x: hidden}, owners=("ffn",))
    moe, taken, of_card = config.moe, ["h", *added], dict[str, Size | int]()
    if config.cards > 1:
        taken, of_card = [], {f"{layer} down of card": hidden}
    if dense or moe is None:
        scratch = _scratch(config, kind, config.intermediate_size, part)
        # In a loop the sum over cards and the normed rows have one place, which the product cannot take.
        gap = hidden * _in_loop(part) if of_card else 0
        width = rounded = part * (config.intermediate_size * kind.itemsize)
        if _rounds_rows(config, kind) and not _multiplies_float8(kind):
            gap = scratch + -WORKSPACE  # the weight of the next product is wide already
        elif _rounds_rows(config, kind):  # in a loop the product has 8 bits, and all weights are copied
            loop, numbers = _in_loop(part), config.intermediate_size * config.hidden_size
            rounded, gap = ceil_div(width, loop + 1), (2 * hidden + 3 * numbers) * loop
        product = _add_gates(graph, layer, x, width, scratch, gap, rounded)
        graph.add_op(f"{layer} project down", [product, *taken], of_card, scratch, owners=("ffn",))
        _add_sum(graph, layer, of_card, ["h", *added])
        return
    wide = part * (moe.top_k * config.hidden_size * kind.itemsize)
    inner = part * (moe.top_k * moe.expert_size * kind.itemsize)
    scores, order, by_expert, gate, up, down = (
        f"{layer} {name}" for name in ("router", "order", "rows by expert", "gate", "up", "down")
    )
    results, shared = [down, order], []
    scratch = _scratch(config, kind, moe.shared_size, part)
    if moe.shared_size:  # XLA makes its gated product first, and keeps it
        width = part * (moe.shared_size * kind.itemsize)
        shared.append(_add_gates(graph, f"{layer} shared", x, width, scratch))
    graph.add_op(f"{layer} route", [x], {scores: part * (3 * 4 * moe.experts)}, WORKSPACE, owners=("ffn",))
    graph.add_op(f"{layer} sort", [scores], {order: part * (4 * 4 * moe.top_k)}, owners=("ffn",))
    gap = f"{layer} gap"
    loop = _in_loop(part)
    # Whether the experts' gate and up products exist only as the product of both.
    gates = (
        _form_of_experts(config, moe, kind, "experts_up", config.hidden_size, moe.expert_size).workspace == 0
    )
    of_gates, of_down = _experts_scratch(config, moe, kind, inner)
    gap_bytes = (hidden + minimum(hidden, WORKSPACE * gates)) * loop
    graph.add_op(f"{layer} gather", [x, order], {by_expert: wide, gap: gap_bytes}, owners=("ffn",))
    if gates:
        graph.add_op(f"{layer} experts gate and up", [by_expert, gap], {up: inner}, owners=("ffn",))
    else:
        graph.add_op(f"{layer} experts gate", [by_expert], {gate: inner}, of_gates, owners=("ffn",))
        graph.add_op(f"{layer} experts up", [by_expert, gap], {up: inner}, of_gates, owners=("ffn",))
        graph.add_op(f"{layer} multiply", [gate, up], owners=("ffn",))
    graph.add_op(f"{layer} experts down", [up], {down: wide}, of_down, owners=("ffn",))
    if shared:
        results.append(f"{layer} shared down")
        graph.add_op(f"{layer} project shared down", shared, {results[-1]: hidden}, scratch, owners=("ffn",))
    graph.add_op(f"{layer} combine", [*results, *taken], of_card, owners=("ffn",))
    _add_sum(graph, layer, of_card, ["h", *added])


def _add_sum(
    graph: GraphTemplate, layer: str, of_card: Mapping[str, Size | int], taken: Sequence[str]
) -> None:
    """Operators of the sum over cards behind a feed-forward layer: a sum is not made in place.

    Arguments:
    - `of_card`: what a card adds, by name; nothing for one card.
    - `taken`: what the sum is added to.
    """
    for name, size in of_card.items():
        graph.add_op(f"{layer} sum", [name], {f"{layer} sum of cards": size}, owners=("ffn",))
        graph.add_op(f"{layer} add", [f"{layer} sum of cards", *taken], owners=("ffn",))


def _added_apart(config: ModelConfig, kind: StepKind, layer: str) -> list[str]:
    """What attention adds, where "h" is kept beside it: the sum of several cards. One card adds to "h" in
    place, but for products of rows of 8 bits in front of experts, whose sums are scaled first."""
    scaled = config.moe is not None and _rounds_rows(config, kind) and _multiplies_float8(kind)
    return [f"{layer} added"] if config.cards > 1 or scaled else []


def _add_gates(
    graph: GraphTemplate,
    layer: str,
    x: str,
    width: Size | int,
    scratch: Size | int = WORKSPACE,
    gap: Size | int = 0,
    rounded: Size | int | None = None,
) -> str:
    """Operators of a gated feed-forward layer before its last product. Returns the input of that.

    Arguments:
    - `layer`: begins the names.
    - `x`: the normed rows.
    - `width`: bytes of each product.
    - `scratch`: bytes that each needs beside.
    - `gap`: bytes that XLA leaves between them.
    - `rounded`: bytes of the gated product; `None` for `width`.
    """
    gate, up, product = (f"{layer} {name}" for name in ("gate", "up", "product"))
    graph.add_op(f"{layer} project gate", [x], {gate: width}, scratch, owners=("ffn",))
    graph.add_op(f"{layer} project up", [x], {up: width}, scratch, owners=("ffn",))
    made = width if rounded is None else rounded
    graph.add_op(f"{layer} multiply", [gate, up], {product: made}, gap, owners=("ffn",))
    return product


def _experts_scratch(
    config: ModelConfig, moe: MoeConfig, kind: StepKind, inner: Size | int
) -> tuple[Size | int, Size | int]:
    """Bytes that products of experts in few bits need beside their results: "gate" or "up", and "down".

    A portable form has a matrix as it is stored, and wide. Triton's has rows in the order of the weights: as
    such XLA gathers the first ones, and copies the `inner` ones.
    """
    if config.quantization is None:
        return 0, 0
    sides = config.hidden_size, moe.expert_size
    gates = _form_of_experts(config, moe, kind, "experts_up", *sides).language
    down = _form_of_experts(config, moe, kind, "experts_down", *sides[::-1]).language
    widened = WORKSPACE + math.prod(sides) * (kind.itemsize + 1)
    return widened * (gates == "xla"), inner if down == "triton" else widened * (down == "xla")


def _form_of_experts(
    config: ModelConfig, moe: MoeConfig, kind: StepKind, leaf: str, inputs: int, outputs: int
) -> Form[int]:
    """The form of products with a leaf of experts' matrices, of so many inputs and outputs."""
    form = config.form_of(leaf)
    rows = jax.ShapeDtypeStruct((1, inputs), _dtype(kind))
    plain = jax.ShapeDtypeStruct((moe.experts, inputs, outputs), _dtype(kind))
    matrices = plain if form is None else quantised_struct((moe.experts, outputs, inputs), form)
    return operator_for(matrices).default(kind.device, rows, matrices, matrices)


def _dtype(kind: StepKind) -> jnp.dtype:
    return jnp.dtype(jnp.bfloat16 if kind.itemsize == 2 else jnp.float32)


def add_head(graph: GraphTemplate, config: ModelConfig, kind: StepKind, hidden: str) -> None:
    """Operators of the head, which reads the rows in `hidden`, over the dimensions M and logits."""
    output = jax.ShapeDtypeStruct((config.own_ids or config.vocab_size, config.hidden_size), _dtype(kind))
    call = default_call(kind.device, output, kind.level)
    part = ceil_div(dim("M"), dim("logits")) if call is None else minimum(dim("M"), call.most_rows)
    if _gathers(config, kind):
        part = minimum(part, GATHERED_ROWS)
    graph.add_op("order masked rows", outputs={"masked rows": dim("M") * (48 + listed_bytes(kind.level))})
    graph.add_op(
        "gather head rows",
        [hidden, "masked rows"],
        {"head rows": part * (2 * config.hidden_size * kind.itemsize)},
        owners=("logits",) if call is None else (),
    )
    if call is None:
        _add_logits(graph, config, kind, part)
    else:
        kept = ceil_div(part, FUSED_UNIT) * call.per_unit + call.fixed
        graph.add_op("choose", ["head rows"], {"decisions": part * 32}, kept)
    graph.add_barrier("commit", [hidden, "masked rows", "decisions"])


def _gathers(config: ModelConfig, kind: StepKind) -> bool:
    """Whether each card has the logits of all ids (`jdllm.decoding.head_decision`)."""
    return config.own_ids is not None and kind.level >= Level.FILTERED


def listed_bytes(level: Level) -> int:
    """Bytes of the likeliest ids of a head row, with their log-probabilities."""
    return 8 * LISTED if level >= Level.FILTERED else 0


def _add_logits(graph: GraphTemplate, config: ModelConfig, kind: StepKind, part: Size) -> None:
    row = 4 * (config.own_ids or config.vocab_size)
    if _gathers(config, kind):
        row += 4 * config.vocab_size
    graph.add_op("project logits", ["head rows"], {"logits": part * row}, WORKSPACE, owners=("logits",))
    extra = math.ceil((_LOGITS[kind.level] - 1) * row)
    graph.add_op("choose", ["logits"], {"decisions": part * 32}, part * extra, owners=("logits",))
