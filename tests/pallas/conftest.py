import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu


@pytest.fixture
def interpreted(capsys: pytest.CaptureFixture[str]):
    """Kernels of Mosaic run in the interpreter, which looks for races."""
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
    assert "RACE" not in capsys.readouterr().out
