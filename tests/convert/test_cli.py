"""`jdllm convert` and the script: what they print, and one line and exit code 2 for a user's mistake."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner, Result

from jdllm import cli
from jdllm.checkpoints.native import is_native, read_manifest
from tests.helpers import Golden

GOLDEN = Golden("llada")
SOURCE = str(GOLDEN.directory)
ROOT = Path(__file__).parents[2]


def run(*args: str | Path) -> Result:
    """Run `jdllm convert` with the error handling of the command line."""
    return CliRunner().invoke(cli.app, ["convert", *map(str, args)])


@pytest.fixture
def native(tmp_path: Path) -> Path:
    assert run(SOURCE, tmp_path / "native").exit_code == 0
    return tmp_path / "native"


def refused(result: Result, *words: str) -> bool:
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return all(word in result.stderr for word in words)


def test_the_direction_follows_from_the_source(tmp_path, native):
    assert is_native(native)
    result = run(native, tmp_path / "back")
    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path / 'back'}: 21 tensors, 640,256 bytes\n"
    assert result.stderr == ""
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {n: x.tobytes() for n, x in back.items()} == {
        n: x.tobytes() for n, x in GOLDEN.tensors("model").items()
    }


def test_a_stated_direction_must_fit_the_source(tmp_path, native):
    assert refused(run(native, tmp_path / "x", "--to", "native"), "native checkpoint already")
    assert refused(run(SOURCE, tmp_path / "x", "--to", "hf"), "no native checkpoint")
    assert refused(run(SOURCE, tmp_path / "x", "--to", "gguf"), "'gguf'", "native or hf")
    assert not (tmp_path / "x").exists()
    assert run(native, tmp_path / "x", "--to", "hf").exit_code == 0


def test_a_cast(tmp_path, native):
    assert run(SOURCE, tmp_path / "cast", "--dtype", "bfloat16").exit_code == 0
    assert read_manifest(tmp_path / "cast").dtype == "bfloat16"
    assert refused(run(native, tmp_path / "x", "--dtype", "bfloat16"), "--dtype")
    assert refused(run(SOURCE, tmp_path / "x", "--dtype", "int8"), "int8", "bfloat16")


def test_an_existing_target(native):
    assert refused(run(SOURCE, native, "--dtype", "float16"), "exists", "--overwrite")
    assert run(SOURCE, native, "--dtype", "float16", "--overwrite").exit_code == 0
    assert read_manifest(native).dtype == "float16"


def test_verify(native):
    result = run("--verify", native)
    assert (result.exit_code, result.stdout) == (0, f"{native}: 21 tensors, 640,256 bytes, all intact\n")
    chunk = native / "final_norm" / "0"
    chunk.write_bytes(chunk.read_bytes()[::-1])
    assert refused(run("--verify", native), "model.transformer.ln_f.weight")
    assert refused(run("--verify", SOURCE), "no native checkpoint")


@pytest.mark.parametrize("args", [[SOURCE], ["--verify", SOURCE, "x"], [], ["/missing", "x"]])
def test_other_mistakes(args):
    assert refused(run(*args))


def script(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "convert" / "hf_to_orbax.py", *args]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_script_converts(tmp_path):
    done = script(SOURCE, tmp_path / "native", "--dtype", "bfloat16")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    manifest = json.loads((tmp_path / "native" / "manifest.json").read_text())
    assert (manifest["dtype"], len(manifest["tensors"])) == ("bfloat16", 21)
    again = script(SOURCE, tmp_path / "native")
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.startswith("error: ")
    assert again.stderr.count("\n") == 1
    assert script(SOURCE, tmp_path / "native", "--overwrite").returncode == 0


def test_an_adapter_is_merged_on_the_way_to_native(tmp_path, native):
    base, adapter = Golden("llama").directory, Golden("lora/linear").directory
    assert run(base, tmp_path / "merged", "--adapter", adapter).exit_code == 0
    assert run(tmp_path / "merged", "--verify").exit_code == 0
    assert run(tmp_path / "merged", tmp_path / "back").exit_code == 0
    name = "model.layers.1.mlp.down_proj.weight"
    found = load_file(tmp_path / "back" / "model.safetensors")[name]
    np.testing.assert_allclose(found, Golden("lora/linear").tensors()[name], rtol=1e-6, atol=1e-8)
    for arguments in ([native, tmp_path / "x"], [native, "--verify"], [base, tmp_path / "x", "--to", "hf"]):
        assert refused(run(*arguments, "--adapter", adapter), "--adapter is merged on the way to native only")
    assert refused(run(base, tmp_path / "x", "--adapter", base), "holds no adapter")
    assert not (tmp_path / "x").exists()
