"""What belongs to no command: the version, and where compiled programs are kept."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from jdllm.cli import CACHE_BYTES, app, keep_compiled_programs

DIRECTORY, SIZE = "JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE"


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"jdllm {version('jdllm')}\n", "")


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (DIRECTORY, SIZE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_variables")
def test_compiled_programs_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    keep_compiled_programs()
    code = "from jax import config as c; print(c.jax_compilation_cache_dir, c.jax_compilation_cache_max_size)"
    read = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert read.stdout == f"/caches/jdllm/compiled {CACHE_BYTES}\n"


@pytest.mark.usefixtures("no_variables")
def test_the_variables_of_the_user_win(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SIZE, "77")
    keep_compiled_programs()
    assert os.environ[SIZE] == "77"


@pytest.mark.usefixtures("no_variables")
def test_a_directory_of_the_user_has_no_bound_but_the_users(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(DIRECTORY, "/mine")
    keep_compiled_programs()
    assert (os.environ[DIRECTORY], os.environ.get(SIZE)) == ("/mine", None)
