"""Windows of text that a user has, the same for every checkpoint with the same tokenizer."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jdllm.errors import RequestError

SUFFIXES = (".md", ".py", ".rst", ".txt")
"""Files that are read of a directory; a file that is named itself may have any suffix."""

_LEAST_BYTES, _BYTES_PER_TOKEN = 1 << 20, 32
"""Bytes that are read of each suffix: at least so many, and so many for each token that is wanted."""

Texts = Mapping[str, Sequence[str]]
"""The contents of files by suffix."""


class Windows(NamedTuple):
    """Disjoint pieces of text, all of one length.

    - `ids`: the tokens of each.
    - `suffixes`: of the files that each is from.
    """

    ids: Int[np.ndarray, "windows context"]
    suffixes: list[str]


def read_texts(paths: Sequence[Path], tokens: int) -> Texts:
    """Read files by suffix: those of `paths` in order, of a directory in the order of their paths.

    Arguments:
    - `paths`: files in UTF-8, and directories, of which files that are no UTF-8 are left out.
    - `tokens`: that are wanted. Of more than 32 bytes for each, and 1 MiB, in files of one suffix every
      second file is read, or every third one, and so on.

    Raises `RequestError` for a path that is not there, for a named file that is no UTF-8, and where there is
    no text.
    """
    files = list(dict.fromkeys(file for path in paths for file in sorted(_files_of(path))))
    texts: dict[str, list[str]] = {}
    for suffix in sorted({file.suffix for file in files}):
        kind = [file for file in files if file.suffix == suffix]
        size = sum(file.stat().st_size for file in kind)
        step = max(1, math.ceil(size / max(_LEAST_BYTES, _BYTES_PER_TOKEN * tokens)))
        found = [_read(file, named=file in paths) for file in kind[::step]]
        texts[suffix] = [text for text in found if text]
    texts = {suffix: kept for suffix, kept in texts.items() if kept}
    if not texts:
        named = ", ".join(path.name for path in paths)
        raise RequestError(f"there is no text in {named}: give files, or directories with {_listed()} files")
    return texts


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        return [file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file()]
    if not path.is_file():
        raise RequestError(f"{path} is no file and no directory: --text takes files, or directories of these")
    return [path]


def _read(file: Path, *, named: bool) -> str | None:
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        if named:
            raise RequestError(f"{file} is no UTF-8: {error.reason} at byte {error.start}") from None
        return None


def _listed() -> str:
    return ", ".join(SUFFIXES[:-1]) + f" or {SUFFIXES[-1]}"


def described(texts: Texts) -> list[dict[str, Any]]:
    """For each suffix the number of files, their bytes, and the SHA-256 of their contents in order."""
    rows = []
    for suffix, contents in texts.items():
        encoded = [content.encode() for content in contents]
        digest = hashlib.sha256(b"".join(encoded)).hexdigest()
        rows.append(
            {"suffix": suffix, "files": len(encoded), "bytes": sum(map(len, encoded)), "sha256": digest}
        )
    return rows


def windows_of(texts: Texts, encode: Callable[[str], list[int]], context: int, count: int) -> Windows:
    """Cut texts into whole windows, and take some of these, evenly spaced.

    Arguments:
    - `encode`: a text to ids. Files of one suffix follow each other, so a window may begin in one file and
      end in the next one.
    - `context`: tokens of a window.
    - `count`: windows in all. Each suffix has as many as any other, as far as there are so many.

    Returns at most `count` windows, by suffix and in the order of the text.

    Raises `RequestError` where no suffix has text for a window.
    """
    whole = {}
    for suffix, contents in texts.items():
        ids = np.concatenate([np.asarray(encode(content), np.int32) for content in contents])
        whole[suffix] = ids[: len(ids) // context * context].reshape(-1, context)
    shares = shared_out(count, {suffix: len(ids) for suffix, ids in whole.items()})
    chosen = {s: whole[s][np.arange(n) * len(whole[s]) // n] for s, n in shares.items() if n}
    if not chosen:
        raise RequestError(
            f"the text has no {context} tokens in files of one suffix: use a smaller --context"
        )
    return Windows(
        np.concatenate(list(chosen.values())), [s for s, taken in chosen.items() for _ in range(len(taken))]
    )


def shared_out(count: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """How many of `count` each gets: equal shares, and of what one has not the others get more."""
    shares = dict.fromkeys(sizes, 0)
    for i, name in enumerate(sorted(sizes, key=lambda name: sizes[name])):
        left = count - sum(shares.values())
        shares[name] = min(sizes[name], left // (len(sizes) - i))
    return shares
