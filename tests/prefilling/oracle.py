"""The stages of answering over selected chunks, in NumPy float64: chunks, draft, scores, selection, decode.

Logits of row `i` tell token `i + 1`, but for `leave_one_out_scores`, where a row tells its own token.
"""

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from tests.prefilling.oracle_model import Cache, Model, forward, log_softmax

Tokens = Int[np.ndarray, "length"]
RowMask = Literal["causal", "full", "query_to_chunk", "none"]

QUERY_PREFILL, OPEN, DENOISE, WRITE_BACK = 3, 0, 1, 2


class Chunk(NamedTuple):
    """The tokens of a chunk, perhaps behind a bos, and its place `[start, end)` in the context."""

    tokens: Tokens
    start: int
    end: int


class Draft(NamedTuple):
    """The label slots at the end, which of them are filled, and the slots after every round."""

    tokens: Int[np.ndarray, "slots"]
    confirmed: Bool[np.ndarray, "slots"]
    states: Int[np.ndarray, "rounds slots"]


class Decoded(NamedTuple):
    """All slots after every decode forward, and what the first denoise forward finds and gives.

    `mask_rows` are the slots still masked in it, `mask_logits` the shifted logits of these.
    """

    states: Int[np.ndarray, "forwards slots"]
    kinds: Int[np.ndarray, "forwards"]
    opened: Cache
    mask_rows: Int[np.ndarray, "masked"]
    mask_logits: Float[np.ndarray, "masked vocab"]

    @property
    def output(self) -> Int[np.ndarray, "slots"]:
        return self.states[-1]


def chunks(context: Tokens, size: int, bos_id: int | None, from_tail: bool = False) -> list[Chunk]:
    """Cut the context every `size` tokens, the short chunk last (`from_tail`: first).

    With `bos_id` a chunk that does not start with it gets it in front and is cut to `size` tokens again.
    """
    first = len(context) % size if from_tail else 0
    starts = [*([0] if first else []), *range(first, len(context), size)]
    cut = []
    for start in starts:
        end = min(start + size, len(context)) if start or not first else first
        tokens = context[start:end]
        if bos_id is not None and tokens[0] != bos_id:
            tokens = np.concatenate([[bos_id], tokens])[:size]
        cut.append(Chunk(tokens, start, end))
    return cut


def draft(
    model: Model,
    prefix: Tokens,
    query: Tokens,
    slots: int,
    mask_id: int,
    rounds: int | None = None,
    steps: int | None = None,
    block_length: int = 32,
    threshold: float = 0.9,
) -> Draft:
    """Labels that the query gets without any chunk.

    With `rounds` the first one and one more a round; with `steps` the first and `steps - 1` more at once;
    with neither all of them are decoded.
    """
    front = np.concatenate([prefix, query])
    positions = np.arange(len(front) + slots)
    prefill = forward(model, front, positions[: len(front)])
    last, cache = prefill.logits[-1], prefill.cache
    if rounds is None and steps is None:
        decoded = decode(model, cache, positions, last, slots, block_length, threshold, mask_id)
        filled = np.isin(decoded.kinds, [OPEN, DENOISE])
        return Draft(decoded.output, np.ones(slots, bool), decoded.states[filled])
    tokens, masked = np.full(slots, mask_id), np.ones(slots, bool)
    cache = forward(model, tokens, positions, cache=cache).cache
    tokens[0], masked[0] = last.argmax(), False
    states = [tokens.copy()]
    for count in [1] * rounds if rounds is not None else [(steps or 1) - 1]:
        if not masked.any():
            break
        out = forward(model, tokens, positions, cache=cache, slots=positions[len(front) :])
        cache = out.cache
        logits = np.concatenate([last[None], out.logits[:-1]])
        surest = np.argsort(np.where(masked, -_confidence(logits), np.inf), kind="stable")
        chosen = surest[: min(count, masked.sum())]
        tokens[chosen], masked[chosen] = logits[chosen].argmax(axis=-1), False
        states.append(tokens.copy())
    return Draft(tokens, ~masked, np.stack(states))


def _confidence(logits: Float[np.ndarray, "rows vocab"]) -> Float[np.ndarray, "rows"]:
    return np.exp(log_softmax(logits).max(axis=-1))


def row_mask(kind: RowMask, prefix: int, chunk: int, rest: int) -> Bool[np.ndarray, "row row"]:
    """Who sees whom in a row of prefix, chunk and rest (query and labels).

    "full" is not everything: the chunk is bidirectional in itself, all else is causal. "none" is everything.
    """
    length, end = prefix + chunk + rest, prefix + chunk
    mask = np.tri(length, dtype=bool) if kind in ("causal", "full") else np.ones((length, length), bool)
    if kind == "full":
        mask[prefix:end, prefix:end] = True
    if kind == "query_to_chunk":
        mask[prefix:end, end:] = False
    return mask


def score_set(
    prefix: int, chunk: int, query: int, scored: Bool[np.ndarray, "slots"], window: int = 0
) -> Int[np.ndarray, "tokens"]:
    """Places in the row of the scored tokens: the query, or its last `window`, and the scored slots."""
    asked = np.arange(query)[-window:] if window else np.arange(query)
    return np.concatenate([prefix + chunk + asked, prefix + chunk + query + np.flatnonzero(scored)])


def chunk_scores(
    model: Model,
    prefix: Tokens,
    chunks: list[Tokens],
    query: Tokens,
    labels: Int[np.ndarray, "slots"],
    scored: Bool[np.ndarray, "slots"],
    mask: RowMask = "causal",
    window: int = 0,
) -> Float[np.ndarray, "chunks"]:
    """The mean log probability of the score set behind each chunk, each token told by the row before it.

    `labels` are all slots, unfilled ones as mask tokens; none (both empty) for self-information.
    """
    scores = []
    for chunk in chunks:
        row = np.concatenate([prefix, chunk, query, labels])
        seen = row_mask(mask, len(prefix), len(chunk), len(query) + len(labels))
        places = score_set(len(prefix), len(chunk), len(query), scored, window)
        logits = forward(model, row, np.arange(len(row)), seen).logits
        scores.append(log_softmax(logits[places - 1])[np.arange(len(places)), row[places]].mean())
    return np.array(scores)


def leave_one_out_scores(
    model: Model,
    prefix: Tokens,
    chunks: list[Tokens],
    query: Tokens,
    labels: Int[np.ndarray, "slots"],
    scored: Bool[np.ndarray, "slots"],
    mask_id: int,
    mask: RowMask = "causal",
    window: int = 0,
) -> Float[np.ndarray, "chunks"]:
    """The same for logits that tell their own row: a row for each scored token, masked and told there."""
    scores = []
    for chunk in chunks:
        row = np.concatenate([prefix, chunk, query, labels])
        seen = row_mask(mask, len(prefix), len(chunk), len(query) + len(labels))
        terms = []
        for place in score_set(len(prefix), len(chunk), len(query), scored, window):
            masked = row.copy()
            masked[place] = mask_id
            logits = forward(model, masked, np.arange(len(row)), seen).logits
            terms.append(log_softmax(logits[place])[row[place]])
        scores.append(np.mean(terms))
    return np.array(scores)


def select(scores: Float[np.ndarray, "chunks"], count: int, keep_first: bool = False) -> list[int]:
    """The best `count` chunks (0: all) in document order, the first one beside them where it is forced."""
    scores = np.where(np.isfinite(scores), scores, -np.inf)
    forced = [0] if keep_first and len(scores) else []
    best = [int(i) for i in np.argsort(-scores, kind="stable") if i not in forced]
    return sorted(forced + (best[:count] if count > 0 else best))


def decode(
    model: Model,
    cache: Cache,
    positions: Int[np.ndarray, "keys"],
    last: Float[np.ndarray, "vocab"],
    slots: int,
    block_length: int,
    threshold: float,
    mask_id: int,
) -> Decoded:
    """Fill the last `slots` of `positions`, block by block, by threshold.

    `cache` ends at the query, or has rows of all masks already. `last` are the logits for the first slot.
    """
    front = len(positions) - slots
    places = np.arange(front, len(positions))
    tokens, masked = np.full(slots, mask_id), np.ones(slots, bool)
    states, kinds = [], []
    first: tuple[Cache, np.ndarray, np.ndarray] | None = None
    for start in range(0, slots, block_length):
        block = slice(start, min(start + block_length, slots))
        if cache.rows == front + start:
            cache = forward(model, tokens[start:], positions, cache=cache).cache
        tokens[start], masked[start] = last.argmax(), False
        states.append(tokens.copy())
        kinds.append(OPEN)
        while masked[block].any():
            out = forward(model, tokens[block], positions, cache=cache, slots=places[block])
            logits = np.concatenate([last[None], out.logits[:-1]])
            rows = np.flatnonzero(masked[block])
            first = first or (cache, rows, logits[rows])
            cache = out.cache
            chosen = _by_threshold(logits, masked[block], threshold)
            tokens[block][chosen], masked[block][chosen] = logits[chosen].argmax(axis=-1), False
            states.append(tokens.copy())
            kinds.append(DENOISE)
        out = forward(model, tokens[block], positions, cache=cache, slots=places[block])
        last, cache = out.logits[-1], out.cache.take(slice(front + block.stop))
        states.append(tokens.copy())
        kinds.append(WRITE_BACK)
    opened, rows, logits = first or (cache, np.zeros(0, int), np.zeros((0, len(model.head))))
    return Decoded(np.stack(states), np.array(kinds), opened, rows, logits)


def _by_threshold(
    logits: Float[np.ndarray, "rows vocab"], masked: Bool[np.ndarray, "rows"], threshold: float
) -> Int[np.ndarray, "chosen"]:
    sure = np.where(masked, _confidence(logits), -np.inf)
    return np.flatnonzero((sure >= threshold) | (np.arange(len(sure)) == sure.argmax()))
