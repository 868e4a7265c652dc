"""What a user of the package sees first."""

import subprocess
import sys
import tomllib
from importlib import metadata, resources
from pathlib import Path

import jdllm

ROOT = Path(__file__).parents[1]


def test_public_names_are_there_and_listed():
    assert set(jdllm.__all__) <= set(dir(jdllm))
    for name in jdllm.__all__:
        assert getattr(jdllm, name) is not None
    assert {"KvPoolError", "NonFiniteError", "CompletionOutput"} <= set(jdllm.__all__)


def test_the_installed_package_has_the_version_of_its_sources():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["dynamic"] == ["version"]
    assert ROOT / settings["tool"]["hatch"]["version"]["path"] == Path(jdllm.__file__)
    assert metadata.version("jdllm") == jdllm.__version__


def test_sources_that_are_not_installed_know_their_version():
    """As in a checkout on the path: no package of that name is installed."""
    code = (
        "import importlib.metadata as m, runpy, sys;"
        "find = m.Distribution.from_name.__func__;"
        "gone = lambda cls, name: find(cls, 'none-such' if name == 'jdllm' else name);"
        "m.Distribution.from_name = classmethod(gone);"
        "sys.argv[1:] = ['--version'];"
        "runpy.run_module('jdllm', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, f"jdllm {jdllm.__version__}\n")


def test_types_are_announced():
    assert resources.files("jdllm").joinpath("py.typed").is_file()


def test_listing_names_and_asking_for_the_version_load_no_jax():
    code = "import sys, jdllm; dir(jdllm), jdllm.__version__; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
