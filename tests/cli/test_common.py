"""What belongs to no command: the version."""

from importlib.metadata import version

from typer.testing import CliRunner

from jdllm.cli import app


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"jdllm {version('jdllm')}\n", "")
