"""The documented noise, recomputed in NumPy: generator words, their pairing, float64 draws."""

import numpy as np

TOKEN, ORDER, SELECTION = 0, 1, 2


def threefry(key: tuple, counter: tuple) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32-20 on Python-sized integers, one 32-bit word at a time."""
    k0, k1, c0, c1 = np.broadcast_arrays(*(np.asarray(w, np.uint64) for w in (*key, *counter)))
    word = np.uint64(0xFFFFFFFF)
    keys = (k0, k1, k0 ^ k1 ^ np.uint64(0x1BD11BDA))
    x0, x1 = (c0 + k0) & word, (c1 + k1) & word
    for round_ in range(20):
        bits = np.uint64((13, 15, 26, 6, 17, 29, 16, 24)[round_ % 8])
        x0 = (x0 + x1) & word
        x1 = ((x1 << bits) | (x1 >> (np.uint64(32) - bits))) & word
        x1 ^= x0
        if round_ % 4 == 3:
            group = round_ // 4 + 1
            x0 = (x0 + keys[group % 3]) & word
            x1 = (x1 + keys[(group + 1) % 3] + np.uint64(group)) & word
    return x0.astype(np.uint32), x1.astype(np.uint32)


def step_key(seed: int, purpose: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    return threefry((seed >> 32, seed & 0xFFFFFFFF), (purpose, step))


def token_bits(seed: int, step: int, position: int, vocab_size: int) -> np.ndarray:
    """Index v reads word (v >> 7) & 1 of the counter that is v without bit 7."""
    v = np.arange(vocab_size)
    words = threefry(step_key(seed, TOKEN, step), (position, (v >> 8) << 7 | v & 127))
    return np.where((v >> 7) & 1, words[1], words[0])


def gumbel(bits: np.ndarray) -> np.ndarray:
    """float64 -log(-log(u)) of u = (bits + 1/2) / 2^32."""
    return -np.log(-np.log((bits.astype(np.float64) + 0.5) / 2**32))


def position_bits(seed: int, purpose: int, step: int, position: int) -> np.ndarray:
    return threefry(step_key(seed, purpose, step), (position, 0))[0]


def uniform(bits: np.ndarray) -> float:
    """float64 (bits + 1/2) / 2^32."""
    return (float(bits) + 0.5) / 2**32


def order_uniform(seed: int, step: int, position: int) -> float:
    """float64 draw that orders one position."""
    return uniform(position_bits(seed, ORDER, step, position))
