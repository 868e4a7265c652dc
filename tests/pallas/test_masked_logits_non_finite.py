"""Hidden rows and weights that are infinite or not numbers: no form gives a finite log-probability."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jdllm.pallas.masked_logits import Level, RowDecision, masked_logits
from jdllm.pallas.masked_logits.mosaic_gpu import masked_logits_mosaic_gpu
from jdllm.pallas.masked_logits.tiles import Tiles
from tests.pallas.masked_rows import asked

ROWS, VOCAB, DEPTH = 64, 256, 128
DAMAGED = 5
SMALL = Tiles(64, row_groups=1, column_groups=1, row_blocks=1, column_blocks=1, stages=2, processors=2)


def operands(where: str, value: float) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    hidden, head = (rng.integers(-1, 2, (n, DEPTH)).astype(np.float32) for n in (ROWS, VOCAB))
    if where == "row":
        hidden[DAMAGED, 7] = value
    else:
        head[DAMAGED, 7] = value
    return jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)


def check(decision: RowDecision, where: str) -> None:
    finite = np.isfinite(decision.logit - decision.maximum - np.log(decision.total))
    if where == "row":
        np.testing.assert_array_equal(finite, np.arange(ROWS) != DAMAGED)
    else:
        assert not finite.any()


CASES = [("row", np.nan), ("row", np.inf), ("head", np.nan)]


@pytest.mark.parametrize("level", [Level.TOP, Level.MOMENTS])
@pytest.mark.parametrize(("where", "value"), CASES)
def test_portable(where: str, value: float, level: Level):
    check(
        masked_logits(*operands(where, value), asked(ROWS, vocab=VOCAB), level, implementation="xla"), where
    )


@pytest.mark.slow
@pytest.mark.parametrize(("where", "value"), CASES[:1])
def test_interpreted(where: str, value: float):
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        rows = asked(ROWS, vocab=VOCAB)
        check(masked_logits_mosaic_gpu(*operands(where, value), rows, Level.TOP, tiles=SMALL), where)


@pytest.mark.gpu
@pytest.mark.parametrize("level", [Level.TOP, Level.MOMENTS])
@pytest.mark.parametrize(("where", "value"), CASES)
def test_on_a_card(where: str, value: float, level: Level):
    rows = asked(ROWS, vocab=VOCAB)
    check(masked_logits(*operands(where, value), rows, level, implementation="mosaic_gpu"), where)
