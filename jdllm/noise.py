"""Counter-based noise: a draw depends on its purpose, never on where or when it is computed.

Every draw is a pure function of (request seed, purpose, step, absolute position, vocabulary index), so
tokens do not change with batch composition, chunk counts, tiling or device count. The generator is
Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), written
in plain elementwise operations so that a kernel can run it too.
"""

import enum
import secrets

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from jdllm.arrays import Tensor

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
LANES = 128


class Purpose(enum.IntEnum):
    """What a draw decides; part of its key."""

    TOKEN = 0
    ORDER = 1
    SELECTION = 2
    SAMPLE = 3
    ACCEPTANCE = 4


@jax.jit  # traced once for each shape, in a hundred operations
def threefry(
    key: tuple[Array, Array], counter: tuple[Array, Array]
) -> tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]]:
    """Two random words for a two-word key and a two-word counter, all uint32 and broadcast together."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(PARITY))
    x0, x1 = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << jnp.uint32(rotation)) | (x1 >> jnp.uint32(32 - rotation))
            x1 = x0 ^ x1
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def sample_seed(seed: int, sample: int) -> int:
    """The 64-bit seed of one of a request's samples: of sample 0 the request's own, else drawn from it."""
    if sample == 0:
        return seed
    words = jnp.asarray(seed_words(seed))
    counter = jnp.asarray([Purpose.SAMPLE, sample], jnp.uint32)
    high, low = threefry((words[0], words[1]), (counter[0], counter[1]))
    return int(high) << 32 | int(low)


def seed_words(seed: int | None) -> np.ndarray:
    """The two uint32 words of a request's 64-bit seed; fresh ones for `None`."""
    if seed is None:
        seed = secrets.randbits(64)
    return np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def step_keys(
    seeds: UInt32[Array, "n 2"], purpose: Purpose, steps: Tensor
) -> tuple[UInt32[Array, " n"], UInt32[Array, " n"]]:
    """Keys of one purpose at one denoising step of each request."""
    steps = jnp.asarray(steps)
    purposes = jnp.full_like(steps, int(purpose), jnp.uint32)
    return threefry((seeds[:, 0], seeds[:, 1]), (purposes, steps.astype(jnp.uint32)))


def vocabulary_bits(
    keys: tuple[Array, Array], positions: Array, vocab_size: int
) -> UInt32[Array, "rows vocab"]:
    """32 random bits for every row and vocabulary index."""
    return id_bits(keys, positions, jnp.arange(vocab_size, dtype=jnp.uint32)[None, :])


def id_bits(
    keys: tuple[Array, Array], positions: Array, ids: Int[Tensor, "#rows ids"]
) -> UInt32[Array, "rows ids"]:
    """32 random bits for every row and some vocabulary indices.

    One generator call gives two words. Index v takes the first or the second word as bit 7 of v is 0 or 1,
    with a counter made of the other bits, so that a tile of 256 indices needs 128 calls. Here every index
    makes its own call: XLA fuses that into what reads the bits, and writes none of them to memory.
    """
    index = jnp.asarray(ids, jnp.uint32)
    counters = index // (2 * LANES) * LANES + index % LANES
    words = threefry((keys[0][:, None], keys[1][:, None]), (positions.astype(jnp.uint32)[:, None], counters))
    return jnp.where(index // LANES % 2 == 0, *words)


def position_bits(keys: tuple[Array, Array], positions: Array) -> UInt32[Array, " rows"]:
    """32 random bits for every row."""
    return threefry(keys, (positions.astype(jnp.uint32), jnp.zeros_like(positions, jnp.uint32)))[0]


def uniform(bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """f32 in (0, 1), up to rounding of (b + 1/2) / 2^32; never 0, at most the largest f32 below 1."""
    u = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    return jnp.minimum(u, jnp.float32(1 - 2.0**-24))


def gumbel(bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Standard Gumbel noise, f32, from u = (b + 1/2) / 2^32.

    In the upper half u is taken as 1 - c with c computed from the complement of the bits, so that the
    largest draws (about 22.9) are as fine as the smallest. A 23- or 24-bit uniform would cut the maximum
    off, which is what made the official samplers use float64.
    """
    upper = bits >= jnp.uint32(1 << 31)
    near = jnp.where(upper, ~bits, bits)
    fraction = (near.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    exponential = jnp.where(upper, -jnp.log1p(-fraction), -jnp.log(fraction))
    return -jnp.log(exponential)
