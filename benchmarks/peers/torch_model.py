"""The published models and one denoising step of them in torch, with random weights, to compare ours with.

Two forms of the same step. `compiled_step` is as strong as we could make it: one product for queries, keys
and values and one for both halves of the gated layer, the fastest attention of torch, grouped products for
experts, the head for masked rows only, all under torch.compile. `eager_step` is written as the official
samplers are. What times them, and other calls of torch, stands at the end.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false

import contextlib
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from jdllm.models.config import ModelConfig
from jdllm.models.rotary import inverse_frequencies

Tensor = torch.Tensor
Layer = dict[str, Any]
Rotation = tuple[Tensor, Tensor]
AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclasses.dataclass(frozen=True)
class Weights:
    """Matrices in the published order `[outputs, inputs]`, but for experts: `[experts, inputs, outputs]`.

    A layer holds "qkv" (queries, keys and values one after another), "o", "gate_up" and "down", its norms and
    biases, and with experts "router".
    """

    embed: Tensor
    layers: list[Layer]
    final_norm: Tensor
    head: Tensor


@dataclasses.dataclass(frozen=True)
class Attention:
    """A way to call torch's attention: a backend, and whether grouped keys and values are repeated first."""

    backend: str
    repeat: bool

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Bidirectional attention of `[batch, heads, rows, head_dim]`; within `selected` only."""
        if self.repeat:
            k, v = repeated(q, k), repeated(q, v)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] != q.shape[1])

    def selected(self) -> contextlib.AbstractContextManager[Any]:
        """Where calls and compilations take this backend, and no other."""
        return sdpa_kernel(BACKENDS[self.backend])


def random_weights(config: ModelConfig, device: str, dtype: torch.dtype) -> Weights:
    """Draw all weights on the device: normal with standard deviation 0.02, norms one."""
    hidden, heads, moe = config.hidden_size, config.num_heads * config.head_dim, config.moe
    qkv = heads + 2 * config.num_kv_heads * config.head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).mul_(0.02)

    def ones(size: int) -> Tensor:
        return torch.ones(size, device=device, dtype=dtype)

    def layer() -> Layer:
        drawn = {"attn_norm": ones(hidden), "ffn_norm": ones(hidden)}
        drawn |= {"qkv": normal(qkv, hidden), "o": normal(hidden, heads)}
        if config.qkv_bias:
            drawn["qkv_bias"] = normal(qkv)
        if config.qk_norm:
            drawn |= {"q_norm": ones(config.head_dim), "k_norm": ones(config.head_dim)}
        if moe is None:
            width = config.intermediate_size
            return drawn | {"gate_up": normal(2 * width, hidden), "down": normal(hidden, width)}
        width = moe.expert_size
        drawn |= {"router": normal(moe.experts, hidden)}
        drawn["gate_up"] = normal(moe.experts, hidden, 2 * width)
        return drawn | {"down": normal(moe.experts, width, hidden)}

    embed, head = normal(config.vocab_size, hidden), normal(config.vocab_size, hidden)
    return Weights(embed, [layer() for _ in range(config.num_layers)], ones(hidden), head)


class Float8(NamedTuple):
    """A matrix `[outputs, inputs]` of floats of 8 bits, and the scale of each output."""

    values: Tensor
    scales: Tensor


def rounded(x: Tensor) -> Float8:
    """Rows in floats of 8 bits, the largest number of each at 448."""
    scales = x.abs().amax(dim=-1, keepdim=True).float() / 448
    return Float8((x.float() / scales.clamp(min=1e-12)).to(torch.float8_e4m3fn), scales)


def with_floats_of_8_bits(weights: Weights) -> Weights:
    """The same model with rounded matrices of dense layers."""
    names = ("qkv", "o", "gate_up", "down")
    layers = [layer | {name: rounded(layer[name]) for name in names} for layer in weights.layers]
    return dataclasses.replace(weights, layers=layers)


def linear(x: Tensor, weight: Tensor | Float8, bias: Tensor | None = None) -> Tensor:
    """Products of rows with a matrix of a layer: rows are rounded where the matrix is."""
    if not isinstance(weight, Float8):
        return F.linear(x, weight, bias)
    rows, of_rows = rounded(x), F.ScalingType.RowWise
    return F.scaled_mm(
        rows.values,
        weight.values.t(),
        scale_a=rows.scales,
        scale_recipe_a=of_rows,
        scale_b=weight.scales.t(),
        scale_recipe_b=of_rows,
        bias=bias,
        output_dtype=x.dtype,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalised in f32, cast, then multiplied by the weight."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def cos_sin(config: ModelConfig, rows: int, device: torch.device) -> Rotation:
    """Cosine and sine of the angles of `rows` positions, f32 `[rows, head_dim / 2]`."""
    frequencies = torch.from_numpy(inverse_frequencies(config.rope, config.head_dim)).to(device)
    angles = torch.arange(rows, device=device).float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[rows, heads, head_dim]` in f32, each dimension with the one half a head on."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def repeated(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values once for every query head."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def attention_branch(
    layer: Layer, config: ModelConfig, h: Tensor, rotation: Rotation, attention: AttentionFn
) -> Tensor:
    """Bidirectional attention of all rows, projected back; the residual is not added."""
    x = rms_norm(h, layer["attn_norm"], config.rms_norm_eps)
    qkv = linear(x, layer["qkv"], layer.get("qkv_bias"))
    qkv = qkv.view(h.shape[0], -1, config.head_dim)
    q, k, v = qkv.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
    if config.qk_norm:
        q, k = (rms_norm(y, layer[f"{n}_norm"], config.rms_norm_eps) for n, y in (("q", q), ("k", k)))
    q, k = (rotate(y, *rotation) for y in (q, k))
    o = attention(*(y.transpose(0, 1)[None] for y in (q, k, v)))
    return linear(o[0].transpose(0, 1).reshape(h.shape[0], -1), layer["o"])


def swiglu(x: Tensor, layer: Layer) -> Tensor:
    """down(silu(gate x) * up x)."""
    gate, up = linear(x, layer["gate_up"]).chunk(2, dim=-1)
    return linear(F.silu(gate) * up, layer["down"])


def route(x: Tensor, layer: Layer, top_k: int) -> tuple[Tensor, Tensor]:
    """Probabilities and experts of each row's `top_k` largest probabilities, `[rows, top_k]`; f32 softmax."""
    return F.linear(x, layer["router"]).float().softmax(-1).topk(top_k, dim=-1)


def grouped_experts(x: Tensor, layer: Layer, top_k: int) -> Tensor:
    """The weighted sum of each row's experts, by grouped products over rows sorted by expert."""
    weights, chosen = route(x, layer, top_k)
    in_order, order = chosen.flatten().sort()
    experts = torch.arange(layer["router"].shape[0], device=x.device)
    ends = torch.searchsorted(in_order, experts, right=True, out_int32=True)
    gate, up = F.grouped_mm(x[order // top_k], layer["gate_up"], offs=ends).chunk(2, dim=-1)
    y = F.grouped_mm(F.silu(gate) * up, layer["down"], offs=ends)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return (y[place].view(x.shape[0], top_k, -1) * weights.to(x.dtype)[..., None]).sum(1)


def looped_experts(x: Tensor, layer: Layer, top_k: int) -> Tensor:
    """The same, expert after expert, as the published module does it."""
    weights, chosen = route(x, layer, top_k)
    out = torch.zeros_like(x)
    for expert in range(layer["router"].shape[0]):
        row, slot = torch.where(chosen == expert)
        gate, up = (x[row] @ layer["gate_up"][expert]).chunk(2, dim=-1)
        y = (F.silu(gate) * up) @ layer["down"][expert]
        out.index_add_(0, row, y * weights[row, slot, None].to(x.dtype))
    return out


def ffn_branch(layer: Layer, config: ModelConfig, h: Tensor, experts: Callable[..., Tensor]) -> Tensor:
    """Feed-forward of all rows, dense or by experts; the residual is not added."""
    x = rms_norm(h, layer["ffn_norm"], config.rms_norm_eps)
    return swiglu(x, layer) if config.moe is None else experts(x, layer, config.moe.top_k)


def source_rows(config: ModelConfig, masked: Tensor) -> Tensor:
    """The rows that predict the masked ones."""
    return (masked - 1).clamp(min=0) if config.logits_shift else masked


Step = Callable[[Tensor], Tensor]
"""Tokens [rows] before a step -> tokens after it."""


def compiled_step(
    weights: Weights,
    config: ModelConfig,
    masked: Tensor,
    transferred: int,
    attention: AttentionFn,
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda f: torch.compile(f, dynamic=False),
) -> Step:
    """Our strong step: the rows `masked` are evaluated and the `transferred` surest of them are committed.

    A layer is compiled once and called for each: it adds the branch that the layer before it left, so that
    sums and norms fuse across layers. `compiled` compiles a function.
    """

    def each(layer: Layer, h: Tensor, branch: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        h = h + branch
        h = h + attention_branch(layer, config, h, rotation, attention)
        return h, ffn_branch(layer, config, h, grouped_experts)

    def decide(tokens: Tensor, h: Tensor, branch: Tensor, norm: Tensor, head: Tensor) -> Tensor:
        rows = source_rows(config, masked)
        logits = F.linear(rms_norm(h[rows] + branch[rows], norm, config.rms_norm_eps), head)
        maximum, token = logits.max(dim=-1)
        confidence = maximum.float() - logits.float().logsumexp(dim=-1)
        surest = confidence.topk(transferred).indices
        return tokens.index_put((masked[surest],), token[surest])

    each, decide = compiled(each), compiled(decide)

    def step(tokens: Tensor) -> Tensor:
        h = F.embedding(tokens, weights.embed)
        rotation, branch = cos_sin(config, len(tokens), tokens.device), torch.zeros_like(h)
        for layer in weights.layers:
            h, branch = each(layer, h, branch, rotation)
        return decide(tokens, h, branch, weights.final_norm, weights.head)

    return step


def eager_step(weights: Weights, config: ModelConfig, masked: Tensor, transferred: int) -> Step:
    """The step as the official samplers do it: the head and an f32 softmax for all rows.

    Attention is torch's own choice; experts are a loop.
    """

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeated(q, k), repeated(q, v))

    def step(tokens: Tensor) -> Tensor:
        h, rotation = F.embedding(tokens, weights.embed), cos_sin(config, len(tokens), tokens.device)
        for layer in weights.layers:
            h = h + attention_branch(layer, config, h, rotation, attention)
            h = h + ffn_branch(layer, config, h, looped_experts)
        logits = F.linear(rms_norm(h, weights.final_norm, config.rms_norm_eps), weights.head)
        if config.logits_shift:
            logits = torch.cat((logits[:1], logits[:-1]))
        token = logits.argmax(dim=-1)
        probability = logits.float().softmax(dim=-1).gather(-1, token[:, None])[:, 0]
        is_masked = torch.zeros_like(tokens, dtype=torch.bool).index_fill(0, masked, True)
        confidence = torch.where(is_masked, probability, -torch.inf)
        surest = confidence.topk(transferred).indices
        return tokens.index_put((surest,), token[surest])

    return step


def usable_attention(config: ModelConfig, rows: int) -> Iterator[tuple[float, Attention]]:
    """(seconds, way) for each way of calling attention that takes this model's shapes on the card."""
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    q, k, v = (
        torch.randn(1, rows, n, config.head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for n in heads
    )
    repeats = (False, True) if config.num_heads != config.num_kv_heads else (False,)
    for attention in itertools.starmap(Attention, itertools.product(BACKENDS, repeats)):
        try:
            with attention.selected():
                seconds = event_seconds(lambda attention=attention: attention(q, k, v))
        except RuntimeError as e:
            print(f"torch: no {attention}: {reason(e)}", flush=True)
            continue
        yield seconds, attention


def fastest_attention(config: ModelConfig, rows: int) -> Attention:
    """The fastest way on this card. Raises `RuntimeError` where there is none."""
    usable = list(usable_attention(config, rows))
    if not usable:
        raise RuntimeError(f"neither of {', '.join(BACKENDS)} attends {rows} rows of this model")
    return min(usable, key=lambda way: way[0])[1]


def event_seconds(run: Callable[[], Any], inner: int = 4, repeats: int = 5, warm_up: int = 2) -> float:
    """Median time of `run`, by events around `inner` calls of it; nothing else may use the device."""
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(inner):
            run()
        end.record()
        end.synchronize()
        times.append(1e-3 * start.elapsed_time(end) / inner)
    return statistics.median(times)


def graph_seconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Mean time of one of `calls`, all of them replayed from one CUDA graph: without the host's share."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return event_seconds(graph.replay) / len(calls)


def reason(error: RuntimeError) -> str:
    """The first line of an error of torch, whose messages are long."""
    return next(iter(str(error).splitlines()), type(error).__name__)
