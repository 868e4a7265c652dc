"""Errors of rounded matrices: what the benchmark says of each form is what theory and NumPy say."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality import rounding_error
from benchmarks.shapes import SHAPES
from tests.benchmarks.shapes import small
from tests.rounding import rounded_to_4_bits

pytestmark = pytest.mark.demo


def test_errors_of_each_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    shape = dataclasses.replace(small("dream-7b"), intermediate_size=64)  # uint4 takes groups of 32
    monkeypatch.setitem(SHAPES, "small", shape)
    table = rounding_error.measure("small", 64, calibrate=True)
    found = {(row["matrix"], row["numbers"], row["form"], row["calibrated"]): row for row in table}
    for matrix, (outputs, inputs) in rounding_error.matrices_of(SHAPES["small"]).items():
        weights, _ = rounding_error.drawn("heavy", outputs, inputs, 1)
        off = np.linalg.norm(rounded_to_4_bits(weights) - weights) / np.linalg.norm(weights)
        plain, gptq = (found[matrix, "heavy", "int4", by_gptq] for by_gptq in (False, True))
        assert abs(plain["weights"] - off) < 1e-5
        assert gptq["products"] < plain["products"]
        for numbers in ("normal", "heavy"):
            few, many, none = (found[matrix, numbers, form, False] for form in ("int4", "int8", None))
            assert 0.05 < few["products"] < 0.2
            assert few["products"] > 5 * many["products"] > 5 * none["products"]


def test_rows_have_outliers():
    _, rows = rounding_error.drawn("heavy", 8, 400, 1000)
    sizes = np.sort(rows.std(axis=0))
    assert (sizes[:-2] < 2).all()
    assert (sizes[-2:] > 15).all()
