"""What a user of the package sees first."""

import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import jdllm

ROOT = Path(__file__).parents[1]


def test_public_names_are_there_and_listed():
    assert set(jdllm.__all__) <= set(dir(jdllm))
    for name in jdllm.__all__:
        assert getattr(jdllm, name) is not None
    assert {"KvPoolError", "NonFiniteError", "CompletionOutput"} <= set(jdllm.__all__)


def test_version_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert jdllm.__version__ == project["version"]


def test_types_are_announced():
    assert resources.files("jdllm").joinpath("py.typed").is_file()


def test_listing_names_and_asking_for_the_version_load_no_jax():
    code = "import sys, jdllm; dir(jdllm), jdllm.__version__; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
