"""One full denoising step in plain JAX: what XLA and cuDNN's attention give without anything of ours.

It reads the stacked weights of `jdllm.models.weights`. No chunks, no per-request parameters, no kernels.
"""

import time
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from benchmarks.record import median_seconds
from jdllm.compiling.executables import temp_bytes
from jdllm.models.config import ModelConfig
from jdllm.models.rotary import inverse_frequencies

Implementation = Literal["cudnn", "xla"]

OPTIONS = {"xla_gpu_enable_triton_gemm": False}
TRANSFERRED = 1


def norm(x: Array, weight: Array, eps: float) -> Array:
    """Normalised in f32, cast, then multiplied by the weight."""
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype) * weight


def rotate(x: Float[Array, "rows heads head_dim"], angles: Float[Array, "rows 1 pairs"]) -> Array:
    """Rotate each dimension with the one half a head on."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(x.dtype)


def step(
    params: Mapping[str, Any],
    config: ModelConfig,
    tokens: Int[Array, " rows"],
    masked: Int[Array, " masked"],
    transferred: int,
    implementation: Implementation,
) -> Int[Array, " rows"]:
    """Evaluate the rows `masked` of one sequence and commit the `transferred` surest of them.

    `implementation` is that of `jax.nn.dot_product_attention`. Raises `NotImplementedError` for experts.
    """
    if config.moe is not None:
        raise NotImplementedError("XLA has no grouped product for experts: lax.ragged_dot is dense")
    rows, eps = tokens.shape[0], config.rms_norm_eps
    angles = jnp.arange(rows)[:, None, None] * jnp.asarray(inverse_frequencies(config.rope, config.head_dim))

    def layer(h: Array, w: dict[str, Array]) -> tuple[Array, None]:
        x = norm(h, w["attn_norm"], eps)
        q, k, v = ((x @ w[n].T + w.get(f"{n}_bias", 0)).reshape(rows, -1, config.head_dim) for n in "qkv")
        if config.qk_norm:
            q, k = norm(q, w["q_norm"], eps), norm(k, w["k_norm"], eps)
        q, k = rotate(q, angles), rotate(k, angles)
        o = jax.nn.dot_product_attention(q[None], k[None], v[None], implementation=implementation)[0]
        h = h + o.reshape(rows, -1) @ w["o"].T
        x = norm(h, w["ffn_norm"], eps)
        return h + (jax.nn.silu(x @ w["gate"].T) * (x @ w["up"].T)) @ w["down"].T, None

    h, _ = lax.scan(layer, params["embed"][tokens], params["layers"])
    source = jnp.maximum(masked - 1, 0) if config.logits_shift else masked
    x = norm(h[source], params["final_norm"], eps)
    logits = jnp.einsum("rd,vd->rv", x, params["head"], preferred_element_type=jnp.float32)
    confidence = logits.max(axis=-1) - jax.nn.logsumexp(logits, axis=-1)
    surest = lax.top_k(confidence, transferred)[1]
    return tokens.at[masked[surest]].set(logits.argmax(axis=-1)[surest].astype(tokens.dtype))


def measure(params: Mapping[str, Any], config: ModelConfig, rows: int, steps: int) -> dict[str, Any]:
    """The row of the table for this step: `steps` steps in one executable, half of the rows masked."""
    masked = np.arange(rows - rows // 2, rows, dtype=np.int32)
    tokens = np.random.default_rng(0).integers(0, config.defined_ids, rows, np.int32)
    tokens[masked] = config.mask_id

    def run(params: Mapping[str, Any], tokens: Array, masked: Array) -> Array:
        def once(_: int, tokens: Array) -> Array:
            return step(params, config, tokens, masked, TRANSFERRED, "cudnn")

        return lax.fori_loop(0, steps, once, tokens)

    start = time.perf_counter()
    inputs = jax.device_put((params, tokens, masked))
    executable = jax.jit(run, compiler_options=OPTIONS).lower(*inputs).compile()
    compile_seconds = time.perf_counter() - start
    seconds = median_seconds(lambda: executable(*inputs)) / steps
    return {
        "attention": "cudnn",
        "step_ms": 1e3 * seconds,
        "temp_mib": temp_bytes(executable) / 2**20,
        "compile_s": compile_seconds,
    }
