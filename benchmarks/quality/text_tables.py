"""The table of the benchmark of checkpoints on a user's text."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.quality.tables import LEVEL, markdown

OF = "perplexity of "
"""What stands before a suffix in the names of a row's values."""


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table with a line for each checkpoint.

    Arguments:
    - `rows`: as `benchmarks.quality.real_text.measure` makes them.
    """
    kinds = list(dict.fromkeys(key for row in rows for key in row if key.startswith(OF)))
    batches = list(dict.fromkeys(key for row in rows for key in row if key.startswith("tokens_s_")))
    header = ("checkpoint", "weights", "kind", "perplexity", *kinds, "bits per byte")
    header += ("ratio to the first", f"{LEVEL:.0%} interval", "same argmax", "scored tokens/s")
    header += tuple(f"generated tokens/s, {key.removeprefix('tokens_s_')} at once" for key in batches)
    return markdown(header, (list(_cells(row, kinds, batches)) for row in rows), 1)


def label(row: dict[str, Any]) -> str:
    """A checkpoint, and the form of its weights where that is another."""
    return row["model"] if row["quantization"] is None else f"{row['model']}, {row['quantization']}"


def _cells(row: dict[str, Any], kinds: Sequence[str], batches: Sequence[str]) -> Iterator[str]:
    yield label(row)
    yield f"{row['weights_bytes'] / 1e9:.3g} GB"
    yield row["kind"]
    yield f"{row['perplexity']:.4f}"
    yield from (f"{row[key]:.4f}" if key in row else "" for key in kinds)
    yield f"{row['bits_per_byte']:.4f}"
    yield f"{row['ratio']:.5f}" if "ratio" in row else ""
    yield f"{row['low']:.5f} to {row['high']:.5f}" if "low" in row else ""
    yield f"{row['same_argmax']:.2%}" if "same_argmax" in row else ""
    yield from (f"{row[key]:.4g}" for key in ("scored_tokens_s", *batches))
