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


def rounded_by_gptq(matrix: np.ndarray, inputs: np.ndarray, form: str) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and scales by GPTQ as it is published, in float64, column by column.

    In 4 bits a group takes of ten scales the one with the least errors before any is made good. Errors are
    weighted as GPTQ counts them.

    Arguments:
    - `inputs`: the rows that the matrix multiplies.
    - `form`: "int8" or "int4".
    """
    sums = inputs.T.astype(np.float64) @ inputs
    sums += np.eye(len(sums)) * 0.05 * np.trace(sums) / len(sums)
    factor = np.linalg.cholesky(np.linalg.inv(sums)).T
    left, numbers, scales = matrix.astype(np.float64), np.zeros(matrix.shape), []
    least, most = (-127, 127) if form == "int8" else (-8, 7)
    for j in range(matrix.shape[1]):
        if form == "int8" and j == 0:
            scales.append(np.abs(left).max(axis=1) / 127)
        elif form == "int4" and j % 128 == 0:
            group, weights = left[:, j : j + 128], np.diag(factor)[j : j + 128] ** -2
            furthest = np.take_along_axis(group, np.abs(group).argmax(axis=1)[:, None], axis=1)
            tried = [furthest * share / -8 for share in np.arange(14, 24) / 20]
            errors = [(group - np.clip(np.rint(group / s), -8, 7) * s) ** 2 @ weights for s in tried]
            scales.append(np.choose(np.argmin(errors, axis=0), [s[:, 0] for s in tried]))
        numbers[:, j] = np.clip(np.rint(left[:, j] / scales[-1]), least, most)
        errors = (left[:, j] - numbers[:, j] * scales[-1]) / factor[j, j]
        left[:, j:] -= np.outer(errors, factor[j, j:])
    return numbers, scales[0] if form == "int8" else np.stack(scales, axis=1)
