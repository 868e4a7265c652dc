"""Rows for the masked head, and what float64 makes of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdllm.noise import Purpose, seed_words, step_keys
from jdllm.pallas.masked_logits import Level, RowDecision, RowPenalty, RowSampling
from tests.decoding import numpy_noise

VOCAB = 300
NONE = -1
UNFILTERED = 2.0


class Expected(NamedTuple):
    token: np.ndarray
    logit: np.ndarray
    maximum: np.ndarray
    total: np.ndarray
    second: np.ndarray
    negative_entropy: np.ndarray


def no_bans(rows: int) -> np.ndarray:
    return np.full((rows, 2), NONE)


def asked(rows: int, *, seed: int = 0, step: int = 0, vocab: int = VOCAB, **columns) -> RowSampling:
    """Rows that ask for nothing but `columns`, each one value or one for every row."""
    keys = step_keys(jnp.asarray([seed_words(seed)]), Purpose.TOKEN, jnp.asarray([step]))
    plain = {
        "temperature": np.float32(0),
        "tempered": False,
        "top_k": np.int32(vocab),
        "top_p": np.float32(UNFILTERED),
        "min_p": np.float32(0),
        "top_k_first": False,
        "limit": np.int32(vocab),
        "listed": False,
    }
    for name, value in plain.items():
        plain[name] = np.full(rows, columns.pop(name, value), np.asarray(value).dtype)
    bans = {name: columns.pop(name, no_bans(rows)) for name in ("token_bans", "confidence_bans")}
    assert not columns
    per_row = jax.tree.map(lambda word: jnp.repeat(word, rows), keys)
    return RowSampling(keys=per_row, positions=jnp.arange(rows), **plain, **bans)


def oracle(logits: np.ndarray, rows: RowSampling, noise: np.ndarray | float = 0.0) -> Expected:
    """Row by row in float64; `noise` is added before the argmax."""
    out = []
    noise = np.broadcast_to(noise, logits.shape)
    for i, row in enumerate(np.asarray(logits, np.float64)):
        allowed = row.copy() if rows.penalty is None else penalised(row, rows.penalty, i)
        allowed[rows.limit[i] :] = -np.inf
        allowed[rows.token_bans[i][rows.token_bans[i] != NONE]] = -np.inf
        temperature = float(rows.temperature[i])
        scale = temperature if temperature > 0 else 1.0
        divisor = scale if rows.tempered[i] else 1.0
        choices = allowed.copy()
        filters = float(rows.top_p[i]), int(rows.top_k[i]), float(rows.min_p[i])
        inside = kept(allowed / scale, *filters, top_k_first=bool(rows.top_k_first[i]))
        choices[~inside] = -np.inf
        if rows.tempered[i]:
            allowed = choices
        measured = allowed / divisor
        measured[rows.confidence_bans[i][rows.confidence_bans[i] != NONE]] = -np.inf
        p = np.exp(measured - measured.max())
        total = p.sum()
        p /= total
        token = int((choices + noise[i]).argmax())
        second = np.sort(measured)[-2]
        entropy = (p * np.log(p + 1e-10)).sum()
        out.append((token, allowed[token] / divisor, measured.max(), total, second, entropy))
    return Expected(*np.reshape(out, (-1, len(Expected._fields))).T)


def penalised(logits: np.ndarray, penalty: RowPenalty, row: int) -> np.ndarray:
    """The logits of a row, id by id: repetition in transformers' way, presence and frequency in vLLM's."""
    out = logits.copy()
    repetition, presence, frequency = (float(column[row]) for column in penalty[2:])
    for token, occurs in enumerate(np.asarray(penalty.occurrences)[penalty.sequence[row]]):
        if occurs > 0:
            out[token] = out[token] * repetition if out[token] < 0 else out[token] / repetition
        if occurs > 1:
            out[token] -= presence + frequency * (occurs - 1)
    return out


def penalties(rows: int, vocab: int) -> RowPenalty:
    """Penalties of three sequences, one of them without any; each number is a short sum of powers of 2."""
    rng = np.random.default_rng(vocab)
    occurrences = np.maximum(rng.integers(-2, 4, (3, vocab)), 0).astype(np.int32)
    sequence = rng.integers(0, 3, rows).astype(np.int32)
    columns = np.array([[1, 2, 0.5], [0, 1.5, -2], [0, -0.25, 0.75]], np.float32)
    return RowPenalty(occurrences, sequence, *columns[:, sequence])


def kept(
    logits: np.ndarray, top_p: float, top_k: int, min_p: float, *, top_k_first: bool = False
) -> np.ndarray:
    """The first token and those before which the probabilities sum to at most `top_p`; of these `top_k`,
    and of these those whose probability is at least `min_p` times the largest. With `top_k_first` the
    probabilities are those among the `top_k` alone, and those before must sum to less."""
    falling = np.argsort(-logits, kind="stable")[:top_k]
    weights = np.exp(logits - logits.max())
    weights /= weights[falling].sum() if top_k_first else weights.sum()
    out = np.zeros(len(logits), bool)
    spent = 0.0
    for token in falling:
        enough = out.any() and (spent >= top_p if top_k_first else spent > top_p)
        if (top_p < 1 and enough) or weights[token] < min_p * weights.max():
            break
        out[token] = True
        spent += weights[token]
    return out


def check(actual: RowDecision, expected: Expected, level: Level = Level.TOP) -> None:
    np.testing.assert_array_equal(actual.token, expected.token)
    for name in ["logit", "maximum", "total"] + ["second"] * (level >= Level.MOMENTS):
        np.testing.assert_allclose(getattr(actual, name), getattr(expected, name), rtol=2e-6, err_msg=name)
    if level >= Level.MOMENTS:
        entropies = actual.negative_entropy, expected.negative_entropy
        np.testing.assert_allclose(*entropies, rtol=2e-6, atol=2e-6)


def drawn(seed: int, step: int, rows: int, vocab: int = VOCAB) -> np.ndarray:
    """float64 noise of rows at positions 0, 1, ..."""
    return np.stack([numpy_noise.gumbel(numpy_noise.token_bits(seed, step, r, vocab)) for r in range(rows)])
