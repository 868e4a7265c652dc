"""Errors of products with rounded matrices of the published shapes, with random numbers.

Run as `python3 -m benchmarks rounding_error [--shapes llada-8b dream-7b] [--rows 256] [--calibrate]` on any
device. "normal" numbers are normal. "heavy" ones are as those of trained models: weights have the tails of a
t distribution with four degrees of freedom, inputs of a matrix have sizes of their own, and rows are mixtures
of an eighth as many directions, and noise. One input in 200 is 30 times as large as others. Errors are
relative, in the Frobenius norm, against float64. `weights` are the rounded weights, `products` are those of a
step in bfloat16. Without a form, weights are in bfloat16. `--calibrate` rounds by GPTQ, too, with other rows
of the same kind; this takes minutes on a CPU.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import case_parser
from benchmarks.record import print_row, record
from benchmarks.shapes import SHAPES
from jdllm.checkpoints.calibration.gptq import RANGES, compensated, feedback
from jdllm.layers import linear
from jdllm.models.config import ModelConfig
from jdllm.quantised import KINDS, Quantised, WeightForm

Numbers = Literal["normal", "heavy"]

CALIBRATED_ROWS = 2  # for each input
OUTLIERS, TIMES = 200, 30  # one input in so many is so many times as large
FREEDOM, DIRECTIONS, NOISE = 4, 8, 0.3


def matrices_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the matrices of a layer that differ in their shapes."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    heads, kv_heads = (config.head_dim * number for number in (config.num_heads, config.num_kv_heads))
    shapes = {"q": (heads, hidden), "k": (kv_heads, hidden), "gate": (ffn, hidden), "down": (hidden, ffn)}
    return {name: shape for name, shape in shapes.items() if name != "k" or kv_heads != heads}


def drawn(numbers: Numbers, outputs: int, inputs: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """A matrix, and rows that it multiplies, in float32; the same ones for the same sizes."""
    of_matrix, rng = (np.random.default_rng([outputs, inputs, what]) for what in range(2))
    scale, x = np.float32(inputs**-0.5), rng.standard_normal((rows, inputs), np.float32)
    if numbers == "normal":
        return of_matrix.standard_normal((outputs, inputs), np.float32) * scale, x
    matrix = of_matrix.standard_t(FREEDOM, (outputs, inputs)).astype(np.float32)
    matrix *= np.exp(of_matrix.standard_normal(inputs, np.float32) / 2)
    directions = of_matrix.standard_normal((inputs // DIRECTIONS, inputs), np.float32)
    mixed = rng.standard_normal((rows, len(directions)), np.float32) @ directions
    x = np.float32(NOISE) * x + mixed * np.float32(len(directions) ** -0.5)
    x[:, of_matrix.permutation(inputs) < inputs // OUTLIERS] *= TIMES
    return matrix * scale, x


def errors(weight: jax.Array | Quantised, matrix: np.ndarray, rows: np.ndarray) -> dict[str, float]:
    """Of a weight that stands for a matrix, and of its products with rows."""
    values = weight.dequantised(jnp.dtype("float32")) if isinstance(weight, Quantised) else weight
    products = jax.jit(linear)(jnp.asarray(rows, jnp.bfloat16), weight)
    exact = rows.astype(np.float64) @ matrix.T.astype(np.float64)
    return {"weights": _relative(values, matrix), "products": _relative(products, exact)}


def _relative(found: Any, exact: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact))


def calibrated(matrix: np.ndarray, rows: np.ndarray, form: WeightForm) -> Quantised:
    """A matrix that is rounded by GPTQ for such rows."""
    values, scales = compensated(jnp.asarray(matrix), feedback(jnp.asarray(rows.T @ rows)), form)
    return KINDS[form].of_stored(KINDS[form].stored_values(values), scales)


def measure(shape: str, rows: int, calibrate: bool) -> list[dict[str, Any]]:
    """A row of the table for each matrix of a layer, each kind of numbers and each form."""
    table = []
    for (name, (outputs, inputs)), numbers in itertools.product(
        matrices_of(SHAPES[shape]).items(), get_args(Numbers)
    ):
        seen = CALIBRATED_ROWS * inputs if calibrate else 0
        matrix, x = drawn(numbers, outputs, inputs, rows + seen)
        weights: dict[tuple[str | None, bool], jax.Array | Quantised] = {
            (None, False): jnp.asarray(matrix, jnp.bfloat16)
        }
        weights |= {(form, False): kind.of(jnp.asarray(matrix)) for form, kind in KINDS.items()}
        if calibrate:
            weights |= {(form, True): calibrated(matrix, x[rows:], form) for form in RANGES}
        for (form, by_gptq), weight in weights.items():
            row = {"shape": shape, "matrix": name, "numbers": numbers, "form": form, "calibrated": by_gptq}
            table.append(row | errors(weight, matrix, x[:rows]))
            print_row(table[-1])
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("rounding_error", __doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llada-8b", "dream-7b"])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--calibrate", action="store_true", help="round by GPTQ, too")
    args = parser.parse_args(arguments)
    table = [row for shape in args.shapes for row in measure(shape, args.rows, args.calibrate)]
    record("rounding_error", table, args.out)
