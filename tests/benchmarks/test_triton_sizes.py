"""Looking for sizes of Triton's kernels: the best of a grid is found, what cannot run is passed over."""

import itertools
import math

from benchmarks.operators.triton_sizes import AnySizes, Case, Timer, climb, row_of
from jdllm.pallas.triton_launch import ProductSizes, Schedule

START = ProductSizes(32, 128, 64, Schedule(4, 3))


def seconds(sizes: AnySizes) -> float:
    """Least at 32 columns, 256 inputs, 2 warps and 5 stages; a stage costs little."""
    assert isinstance(sizes, ProductSizes)
    ratios = sizes.columns / 32, sizes.depth / 256, sizes.schedule.warps / 2
    far = sum(abs(math.log2(ratio)) for ratio in ratios)
    return 1 + far + abs(sizes.schedule.stages - 5) / 10


def test_the_best_that_runs_is_found():
    def build(sizes: AnySizes) -> Timer:
        assert isinstance(sizes, ProductSizes)
        if sizes.depth * sizes.schedule.stages > 1024:
            raise ValueError("out of shared memory")
        return lambda: seconds(sizes)

    said: list[AnySizes] = []
    tried = climb(Case(START, ("columns", "depth"), build), lambda sizes, _: said.append(sizes))
    grid = [
        ProductSizes(32, columns, depth, Schedule(warps, stages))
        for columns, depth, warps, stages in itertools.product(
            (16, 32, 64, 128, 256), (16, 32, 64, 128, 256, 512), (1, 2, 4, 8, 16), range(1, 9)
        )
        if depth * stages <= 1024
    ]
    assert min(tried, key=lambda sizes: tried[sizes]) == min(grid, key=seconds)
    assert said == list(tried)
    assert len(set(said)) == len(said) < len(grid) / 10
    refused = [sizes for sizes, time in tried.items() if time == math.inf]
    assert refused
    assert not set(refused) & set(grid)
    assert {sizes.rows for sizes in tried} == {32}


def test_a_gain_of_less_than_a_hundredth_is_none():
    def build(sizes: AnySizes) -> Timer:
        return lambda: 1 - 0.001 * sizes.schedule.stages

    tried = climb(Case(START, (), build), lambda *_: None)
    assert len(tried) == 1 + 4


def test_a_row_names_all_numbers():
    assert row_of("head", START, 2e-6) == {
        "case": "head", "rows": 32, "columns": 128, "depth": 64, "warps": 4, "stages": 3, "us": 2.0
    }  # fmt: skip
