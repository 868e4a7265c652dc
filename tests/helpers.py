"""Access to the recorded reference data under `tests/goldens`."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
"""Values of a parametrised test that the slow lane runs."""

ROOT = Path(__file__).parent.parent
GOLDENS = ROOT / "tests" / "goldens"


@dataclasses.dataclass(frozen=True)
class Golden:
    """The recorded data of one family, such as "llada": a checkpoint directory and what it computes."""

    family: str

    @property
    def directory(self) -> Path:
        return GOLDENS / self.family

    def json(self, name: str) -> dict[str, Any]:
        """Parse `<name>.json`: "config", "goldens", "trajectories", "transfer_table"."""
        return json.loads((self.directory / f"{name}.json").read_text())

    def tensors(self, name: str = "goldens") -> dict[str, np.ndarray]:
        """Read `<name>.safetensors`: "goldens", "trajectories" or the weights, "model"."""
        return load_file(self.directory / f"{name}.safetensors")
