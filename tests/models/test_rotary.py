import cmath
import math

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.errors import ConfigError
from jdllm.layers import rotate
from jdllm.models.rotary import RopeConfig, cos_sin, inverse_frequencies
from tests.helpers import Golden

NO_POSITIONS = {"max_position_embeddings": None}
BASE = {"rope_theta": 500000.0, "max_position_embeddings": 4096}


def from_hf(**values) -> RopeConfig:
    return RopeConfig.from_hf({**BASE, **values}, default_theta=10000.0)


def scaled(**scaling) -> RopeConfig:
    return from_hf(rope_scaling=scaling)


def plain(theta: float, dim: int) -> list[float]:
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


def ntk_by_hand(theta: float, dim: int, stretch: float) -> list[float]:
    """The base at which the lowest frequency is divided by `stretch`, found by bisection."""
    lowest = plain(theta, dim)[-1] / stretch
    low, high = theta, theta * stretch**2
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if plain(middle, dim)[-1] < lowest else (middle, high)
    return plain(low, dim)


def yarn_by_hand(theta: float, dim: int, factor: float, original: int, whole: bool) -> list[float]:
    """Pairs that turn over 32 times are kept, those under once interpolated, a line over pairs between."""

    def pair_with(turns: float) -> float:
        return dim / 2 * math.log(original / (2 * math.pi * turns), theta)

    first, last = pair_with(32), pair_with(1)
    if whole:
        first, last = math.floor(first), math.ceil(last)
    out = []
    for i, frequency in enumerate(plain(theta, dim)):
        interpolated = min(max((i - first) / (last - first), 0.0), 1.0)
        out.append(frequency * (1 - interpolated) + frequency / factor * interpolated)
    return out


def llama3_by_hand(
    theta: float, dim: int, factor: float, low: float, high: float, original: int
) -> list[float]:
    out = []
    for frequency in plain(theta, dim):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            out.append(frequency)
        elif wavelength > original / low:
            out.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append((1 - smooth) * frequency / factor + smooth * frequency)
    return out


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (from_hf(), plain(5e5, 128)),
        (scaled(rope_type="default"), plain(5e5, 128)),
        (scaled(type="linear", factor=4.0), [f / 4 for f in plain(5e5, 128)]),
        (scaled(rope_type="ntk", factor=8.0), ntk_by_hand(5e5, 128, 8.0)),
        (scaled(**YARN), yarn_by_hand(5e5, 128, 4.0, 32768, whole=True)),
        (scaled(**YARN, truncate=False), yarn_by_hand(5e5, 128, 4.0, 32768, whole=False)),
        (scaled(**LLAMA3), llama3_by_hand(5e5, 128, 8.0, 1.0, 4.0, 8192)),
    ],
    ids=["none", "default", "linear", "ntk", "yarn", "yarn-untruncated", "llama3"],
)
def test_frequencies_follow_their_definition(rope, expected):
    actual = inverse_frequencies(rope, 128)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=4e-7)


def test_ntk_keeps_the_highest_frequency_and_interpolates_the_lowest():
    before, after = (inverse_frequencies(r, 128) for r in (from_hf(), scaled(rope_type="ntk", factor=32.0)))
    assert after[0] == before[0]
    np.testing.assert_allclose(after[-1], before[-1] / 32, rtol=1e-6)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.5}, 1.5),
        ({"attn_factor": 0.5}, 0.5 * (0.1 * math.log(4) + 1)),
        ({"attn_factor": 2.0, "mscale": 0.7, "mscale_all_dim": 0.7, "extrapolation_factor": 1}, 2.0),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
    ],
)
def test_yarn_scales_cos_and_sin(extra, expected):
    positions = jnp.arange(5)
    cos, sin = cos_sin(scaled(**YARN, **extra), 64, positions)
    np.testing.assert_allclose(np.hypot(cos, sin), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({**YARN, "attn_factor": 2.0, "attention_factor": 1.5}, "attn_factor.*and.*attention_factor"),
        ({**YARN, "extrapolation_factor": 0.5}, "extrapolation_factor.*expected 1"),
        ({"rope_type": "longrope"}, "rope_type is 'longrope', expected one of"),
        ({"type": "su", "short_factor": [1.0]}, "rope_type is 'su', expected one of"),
    ],
)
def test_what_no_scaling_means_is_named_first(scaling, message):
    with pytest.raises(ConfigError, match=message):
        scaled(**scaling)


def test_angles_are_the_published_f32_angles_far_out():
    """The models round position times frequency to f32; cos and sin of that are right to 1e-6."""
    positions = np.array([0, 1, 4095, 65537, 131071, 1_000_003])
    frequencies = inverse_frequencies(from_hf(), 128)
    angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    cos, sin = jax.jit(lambda p: cos_sin(from_hf(), 128, p))(jnp.asarray(positions))
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-6)


@pytest.mark.slow
@given(
    hnp.arrays(np.float32, (3, 2, 16), elements=st.floats(-4, 4, width=32)),
    st.lists(st.integers(0, 2000), min_size=3, max_size=3),
    st.sampled_from([1.0, 0.5, 0.25]),
)
def test_rotation_is_a_complex_product(x, positions, fraction):
    rope = RopeConfig(500000.0, fraction)
    dim = int(16 * fraction)
    actual = np.asarray(rotate(jnp.asarray(x), *cos_sin(rope, 16, jnp.asarray(positions))))
    expected = x.astype(np.float64)
    for row, head, i in np.ndindex(3, 2, dim // 2):
        z = complex(x[row, head, i], x[row, head, i + dim // 2])
        z *= cmath.exp(1j * positions[row] * plain(500000.0, dim)[i])
        expected[row, head, [i, i + dim // 2]] = z.real, z.imag
    np.testing.assert_allclose(actual, expected, atol=2e-3)
    np.testing.assert_array_equal(actual[..., dim:], x[..., dim:])


def test_rotation_in_bfloat16_is_the_f32_rotation_rounded_once():
    x = jax.random.normal(jax.random.key(0), (7, 3, 32), jnp.bfloat16)
    angles = cos_sin(from_hf(), 32, jnp.arange(7) * 1000)
    actual = rotate(x, *angles)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_array_equal(actual, rotate(x.astype(jnp.float32), *angles).astype(jnp.bfloat16))


def test_recorded_keys_are_rotated_alike():
    """Layer 0 keys of a published model (Fast-dLLM v2), recorded after rotation."""
    golden = Golden("fast_dllm_v2")
    config, weights, recorded = golden.json("config"), golden.tensors("model"), golden.tensors()
    expected = recorded["cache.prefill_k_layer0"][0].transpose(1, 0, 2)
    length, heads, dim = expected.shape
    h = weights["model.embed_tokens.weight"][recorded["cache.input_ids"][0, :length]].astype(np.float64)
    h /= np.sqrt((h * h).mean(-1, keepdims=True) + config["rms_norm_eps"])
    layer = "model.layers.0."
    k = h * weights[layer + "input_layernorm.weight"] @ weights[layer + "self_attn.k_proj.weight"].T
    k = (k + weights[layer + "self_attn.k_proj.bias"]).reshape(length, heads, dim)
    rope = RopeConfig.from_hf(config, default_theta=10000.0)
    actual = rotate(jnp.asarray(k, jnp.float32), *cos_sin(rope, dim, jnp.arange(length)))
    np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_rope_parameters_are_read_like_their_older_spelling():
    new = {"rope_parameters": {**YARN, "rope_theta": 1e6, "partial_rotary_factor": 0.5}}
    old = {"rope_scaling": YARN, "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    assert RopeConfig.from_hf(new, 1e4) == RopeConfig.from_hf(old, 1e4)
    assert hash(RopeConfig.from_hf(new, 1e4)) == hash(RopeConfig.from_hf(old, 1e4))
    assert RopeConfig.from_hf({"rope_scaling": None}, 1e4) == RopeConfig(1e4)


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        (from_hf(), 4096),
        (from_hf(rope_theta=5e7), 4096),
        (scaled(rope_type="linear", factor=2.5), 10240),
        (scaled(rope_type="ntk", factor=4), 16384),
        (scaled(**YARN), 131072),
        (scaled(**LLAMA3), 4096),
        (RopeConfig(1e4, kind="ntk", factor=2.0), 8192),
    ],
)
def test_effective_context(rope, context):
    assert rope.effective_context(4096) == context


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": ["ntk"], "factor": 4.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": "4"}}, "factor"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": True}}, "factor"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 0.5}}, "factor"),
        ({"rope_scaling": 4.0}, "rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}}, "low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        (
            {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": None}},
            "original_max_position_embeddings",
        ),
        (
            {"rope_scaling": {**YARN, "original_max_position_embeddings": None}, **NO_POSITIONS},
            "original_max",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' has other frequencies"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 10**400}}, "factor"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_theta": 1e300}, "rope_theta"),
        ({"rope_theta": math.nan}, "rope_theta"),
        ({"rope_scaling": {**YARN, "truncate": None}}, "truncate"),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling and rope_parameters",
        ),
        ({"rope_scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 2.0}}, "beta_fast"),
        ({"rope_scaling": {**YARN, "truncate": "no"}}, "truncate"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ],
)
def test_impossible_configurations_name_the_key(values, named):
    with pytest.raises(ConfigError, match=named):
        from_hf(**values)


@pytest.mark.parametrize("fraction", [0.1, 0.02])
def test_dimensions_that_cannot_be_paired_are_refused(fraction):
    with pytest.raises(ConfigError, match="even"):
        inverse_frequencies(RopeConfig(1e4, fraction), 50)
