"""What numbers of few bits stand for, by NumPy."""

import ml_dtypes
import numpy as np


def rounded_to_8_bits(matrix: np.ndarray) -> np.ndarray:
    """What a matrix of 8 bits stands for: of each row the largest number is 127 steps."""
    steps = np.abs(matrix).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(matrix / steps) * steps


def rounded_to_4_bits(matrix: np.ndarray) -> np.ndarray:
    """What a matrix of 4 bits stands for."""
    values, scales = rounded_in_groups_by_numpy(matrix)
    return values * np.repeat(scales, 128, axis=1)[:, : matrix.shape[1]]


def rounded_to_floats_of_8_bits(matrix: np.ndarray) -> np.ndarray:
    """What a matrix of floats of 8 bits stands for: of each row the largest number is 448 steps."""
    steps = np.abs(matrix).max(axis=1, keepdims=True) / np.float32(448)
    values = (matrix / np.where(steps > 0, steps, 1)).astype(ml_dtypes.float8_e4m3fn)
    return values.astype(np.float32) * steps


def rounded_as_stored(rows: np.ndarray) -> np.ndarray:
    """What keys or values stand for that are stored in floats of 8 bits: of each row of a head no number is
    larger than 448 steps, and a step is the least such power of two."""
    share, exponent = np.frexp(np.abs(rows).max(axis=-1, keepdims=True) / 448)
    steps = np.ldexp(1.0, np.where(share > 0.5, exponent, exponent - 1))
    return (rows / steps).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * steps


def rounded_in_groups_by_numpy(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of 4 bits, and the scale of each 128 inputs of a row: of ten scales the one with the least
    squared errors, which are counted in steps of 1/512."""
    values, scales = (
        np.zeros(matrix.shape, np.float32),
        np.zeros((len(matrix), -(-matrix.shape[1] // 128)), np.float32),
    )
    for row, group in np.ndindex(scales.shape):
        part = matrix[row, 128 * group : 128 * group + 128].astype(np.float32)
        least = np.inf
        for factor in np.arange(14, 24) / 20:
            scale = part[np.abs(part).argmax()] * np.float32(factor / -8)
            nearest = np.clip(np.rint(part / scale), -8, 7)
            error = (np.rint((part / scale - nearest) * 512) ** 2).sum() * factor**2
            if error < least:
                least, scales[row, group] = error, scale
                values[row, 128 * group : 128 * group + 128] = nearest
    return values, scales


def rounded_to_4_bits_with_offsets(matrix: np.ndarray) -> np.ndarray:
    """What a matrix of 4 bits with offsets stands for."""
    values, scales, offsets = rounded_with_offsets_by_numpy(matrix)
    return values * np.repeat(scales, 32, axis=1) + np.repeat(offsets, 32, axis=1)


def rounded_with_offsets_by_numpy(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of 4 bits, and the scale and offset of each 32 inputs of a row, in bfloat16: of seven shares of
    the range, of which zero is part, the one with the least squared errors, in steps of 1/512."""
    groups = matrix.astype(np.float32).reshape(len(matrix), -1, 32)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    found, least = (np.zeros_like(groups), low, low), np.full(low.shape, np.inf)
    for share in np.arange(14, 21) / 20:
        scales = ((high - low) * np.float32(np.float32(share) / np.float32(15))).astype(ml_dtypes.bfloat16)
        scales = scales.astype(np.float32)
        offsets = ((low + high + scales) / 2).astype(ml_dtypes.bfloat16).astype(np.float32)
        exact = (groups - offsets[..., None]) / np.where(scales == 0, 1, scales)[..., None]
        nearest = np.clip(np.rint(exact), -8, 7)
        errors = (np.rint((exact - nearest) * 512) ** 2).sum(-1) * share**2
        tried, better = (nearest, scales, offsets), errors < least
        found = tuple(
            np.where(better[..., None] if new.ndim > 2 else better, new, old)
            for new, old in zip(tried, found, strict=True)
        )
        least = np.minimum(least, errors)
    values, scales, offsets = found
    return values.reshape(matrix.shape), scales, offsets


def rounded_by_gptq(
    matrix: np.ndarray, inputs: np.ndarray, form: str, in_order: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and scales by GPTQ as it is published, in float64, column by column.

    In 4 bits a group takes of ten scales the one with the least errors before any is made good. Errors are
    weighted by the sizes of inputs.

    Arguments:
    - `inputs`: the rows that the matrix multiplies.
    - `form`: "int8" or "int4".
    - `in_order`: round columns as they stand. Else those of the largest inputs are the first.
    """
    sums = damped_sums(inputs)
    sizes = np.sqrt(np.diag(sums))
    order = np.arange(len(sums)) if in_order else np.argsort(-sizes, kind="stable")
    left, numbers = matrix.astype(np.float64), np.zeros(matrix.shape)
    scales = np.abs(left).max(axis=1, keepdims=True) / 127
    if form == "int4":
        starts = range(0, len(sums), 128)
        scales = np.stack([scales_by_size(left[:, i : i + 128], sizes[i : i + 128]) for i in starts], axis=1)
    of = scales.repeat(len(sums) if form == "int8" else 128, axis=1)
    least, most = (-127, 127) if form == "int8" else (-8, 7)
    factor = np.linalg.cholesky(np.linalg.inv(sums[np.ix_(order, order)])).T
    for i, j in enumerate(order):
        numbers[:, j] = np.clip(np.rint(left[:, j] / of[:, j]), least, most)
        errors = (left[:, j] - numbers[:, j] * of[:, j]) / factor[i, i]
        left[:, order[i:]] -= np.outer(errors, factor[i, i:])
    return numbers, scales[:, 0] if form == "int8" else scales


def scales_by_size(group: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Of ten scales, for each row of a group of 4 bits the one with the least errors, weighted by `sizes`."""
    furthest = np.take_along_axis(group, np.abs(group).argmax(axis=1)[:, None], axis=1)
    tried = [furthest * share / -8 for share in np.arange(14, 24) / 20]
    errors = [(group - np.clip(np.rint(group / scale), -8, 7) * scale) ** 2 @ sizes for scale in tried]
    return np.choose(np.argmin(errors, axis=0), [scale[:, 0] for scale in tried])


def following_by_numpy(matrix: np.ndarray, inputs: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The matrix whose products with `inputs` come closest to those of `matrix` with `others`, in float64.

    Arguments:
    - `inputs`: rows.
    - `others`: as many rows.
    """
    drift = (others.astype(np.float64) - inputs).T @ inputs
    return matrix + np.linalg.solve(damped_sums(inputs), (matrix @ drift).T).T


def damped_sums(inputs: np.ndarray) -> np.ndarray:
    sums = inputs.T.astype(np.float64) @ inputs
    return sums + np.eye(len(sums)) * 0.1 * np.trace(sums) / len(sums)
