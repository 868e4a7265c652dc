import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.random_checkpoint import llada_hf_config, write_random_checkpoint
from jdllm.checkpoints import loading
from jdllm.checkpoints.loading import check, load_params, read_index, resolve_dtype
from jdllm.errors import CheckpointError, ConfigError
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import Params, is_spec, spec_tree
from tests.helpers import Golden

GOLDEN = Golden("llada")
CONFIG = config_from_hf(GOLDEN.directory)
BLOCK = "model.transformer.blocks."


@pytest.fixture
def copy(tmp_path) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(GOLDEN.directory, tmp_path / "checkpoint"))


def write(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(tensors, directory / "model.safetensors")


def stored_values(params: Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """The loaded leaves under their stored names, by the names of the published model."""
    names = {
        "attn_norm": "attn_norm",
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "o": "attn_out",
        "ffn_norm": "ff_norm",
        "gate": "ff_proj",
        "up": "up_proj",
        "down": "ff_out",
    }
    out = {
        "model.transformer.wte.weight": np.asarray(params["embed"]),
        "model.transformer.ln_f.weight": np.asarray(params["final_norm"]),
    }
    if "head" in params:
        out["model.transformer.ff_out.weight"] = np.asarray(params["head"])
    for layer in range(config.num_layers):
        for leaf, name in names.items():
            out[f"{BLOCK}{layer}.{name}.weight"] = np.asarray(params["layers"][leaf][layer])
    return out


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


# Values


@pytest.mark.parametrize("piece_bytes", [1, 1000, 4096, 8 << 20])
def test_leaves_hold_the_stored_values(monkeypatch, piece_bytes):
    monkeypatch.setattr(loading, "PIECE_BYTES", piece_bytes)
    params = load_params(GOLDEN.directory, CONFIG, "float32")
    assert_same(stored_values(params, CONFIG), GOLDEN.tensors("model"))
    shapes = jax.tree.map(lambda spec: spec.shape, spec_tree(CONFIG), is_leaf=is_spec)
    assert jax.tree.map(lambda x: x.shape, params) == shapes


@pytest.mark.parametrize(
    ("stored", "loaded"),
    [
        (ml_dtypes.bfloat16, "bfloat16"),
        (ml_dtypes.bfloat16, "float32"),
        (np.float16, "float16"),
        (np.float16, "bfloat16"),
        (np.float32, "bfloat16"),
        (np.float32, "float16"),
    ],
)
def test_values_are_rounded_to_the_loaded_type_once(copy, stored, loaded):
    tensors = {name: value.astype(stored) for name, value in GOLDEN.tensors("model").items()}
    write(copy, tensors)
    actual = stored_values(load_params(copy, CONFIG, loaded), CONFIG)
    assert_same(actual, {name: value.astype(np.dtype(loaded)) for name, value in tensors.items()})


def test_a_tied_head_is_not_loaded(copy):
    config = dataclasses.replace(CONFIG, tied_head=True)
    tensors = GOLDEN.tensors("model")
    head = tensors.pop("model.transformer.ff_out.weight")
    write(copy, tensors)
    assert_same(stored_values(load_params(copy, config, "float32"), config), tensors)
    with pytest.raises(CheckpointError, match=rf"model\.transformer\.ff_out\.weight \[{head.shape[0]}, 64\]"):
        load_params(copy, CONFIG, "float32")


def test_shards_hold_what_a_single_file_holds(tmp_path):
    hf_config = llada_hf_config(CONFIG, "bfloat16")
    config = config_from_hf(hf_config)
    single = write_random_checkpoint(tmp_path / "single", hf_config)
    sharded = write_random_checkpoint(tmp_path / "sharded", hf_config, shard_bytes=50_000)
    assert sorted(path.name for path in single.iterdir()) == ["config.json", "model.safetensors"]
    files = sorted(sharded.glob("*.safetensors"))
    assert len(files) > 3
    assert all(path.stat().st_size < 70_000 for path in files)
    expected = load_file(single / "model.safetensors")
    for directory in (single, sharded):
        assert_same(stored_values(load_params(directory, config, "bfloat16"), config), expected)


def test_random_checkpoints_are_what_they_say(tmp_path):
    config = dataclasses.replace(CONFIG, eot_id=506, num_layers=3)
    directory = write_random_checkpoint(tmp_path / "random", llada_hf_config(config, "float32"))
    assert config_from_hf(directory) == dataclasses.replace(config, dtype="float32")
    tensors = load_file(directory / "model.safetensors")
    np.testing.assert_array_equal(tensors["model.transformer.ln_f.weight"], 1.0)
    for name in ("model.transformer.wte.weight", f"{BLOCK}0.q_proj.weight"):
        assert tensors[name].std() == pytest.approx(0.02, rel=0.05)
    one, other = (tensors[f"{BLOCK}{i}.q_proj.weight"] for i in (0, 1))
    assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.1


# Progress


def test_progress_reaches_the_bytes_of_all_tensors():
    calls = []
    load_params(GOLDEN.directory, CONFIG, "float32", progress=lambda *call: calls.append(call))
    done, totals = zip(*calls, strict=True)
    assert set(totals) == {sum(x.nbytes for x in GOLDEN.tensors("model").values())}
    assert list(done) == sorted(set(done))
    assert done[-1] == totals[0]
    assert len(calls) == len(GOLDEN.tensors("model"))


@pytest.mark.parametrize(
    ("progress", "terminal", "drawn"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_the_bar_is_drawn_on_terminals_only(monkeypatch, capsys, progress, terminal, drawn):
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")
    load_params(GOLDEN.directory, CONFIG, "float32", progress=progress)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("loading weights" in err) == drawn


# Types


@pytest.mark.parametrize(
    ("stated", "asked", "resolved"),
    [
        (None, "auto", "float32"),
        ("float16", "auto", "float16"),
        ("float16", "bfloat16", "bfloat16"),
        (None, "float16", "float16"),
    ],
)
def test_the_type_is_asked_stated_or_stored(stated, asked, resolved):
    config = dataclasses.replace(CONFIG, dtype=stated)
    assert resolve_dtype(GOLDEN.directory, config, asked) == resolved


def test_the_stored_type_is_that_of_most_bytes(copy):
    tensors = GOLDEN.tensors("model")
    write(copy, {n: x.astype(ml_dtypes.bfloat16) if x.ndim == 2 else x for n, x in tensors.items()})
    assert resolve_dtype(copy, CONFIG, "auto") == "bfloat16"


@pytest.mark.parametrize("dtype", ["int8", "fp32", ""])
def test_another_type_is_refused(dtype):
    with pytest.raises(ConfigError, match="bfloat16, float16, float32"):
        resolve_dtype(GOLDEN.directory, CONFIG, dtype)


# Damaged files


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    damaged = {
        "cut data": content[:-1],
        "cut header": content[:100],
        "short": content[:4],
        "empty": b"",
        "text": b"version https://git-lfs.github.com/spec/v1\n" * 3,
        "longer": content + b"\0",
    }
    path.write_bytes(damaged[how])


@pytest.mark.parametrize("how", ["cut data", "cut header", "short", "empty", "text", "longer"])
def test_a_damaged_file_is_named(copy, how):
    damage(copy / "model.safetensors", how)
    with pytest.raises(CheckpointError, match=rf"{copy}/model\.safetensors is damaged"):
        load_params(copy, CONFIG, "float32")


def test_a_file_that_shrinks_while_it_is_read_is_named(copy):
    file = copy / "model.safetensors"
    with pytest.raises(CheckpointError, match=f"{file} ended too early"):
        load_params(copy, CONFIG, "float32", progress=lambda *_: damage(file, "cut header"))


def test_a_directory_without_weights_is_named(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=f"in {tmp_path}: only safetensors"):
        read_index(tmp_path)


@pytest.fixture
def sharded(tmp_path) -> Path:
    """Three shards with an index; the first holds the embedding."""
    tensors = list(GOLDEN.tensors("model").items())
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    weight_map = {}
    for i, name in enumerate(names):
        save_file(dict(tensors[i::3]), tmp_path / name)
        weight_map |= {tensor: name for tensor, _ in tensors[i::3]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_missing_shards_are_all_named(sharded):
    assert read_index(sharded).keys() == GOLDEN.tensors("model").keys()
    for i in (1, 3):
        (sharded / f"model-0000{i}-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks files .*model-00001-of-00003.*, model-00003-of-00003"):
        read_index(sharded)


def test_a_shard_that_lacks_its_tensor_is_named(sharded):
    file = sharded / "model-00002-of-00003.safetensors"
    tensors = load_file(file)
    lost = sorted(tensors)[:2]
    save_file({name: x for name, x in tensors.items() if name not in lost}, file)
    with pytest.raises(CheckpointError, match=f"{lost[0]} in {file.name}.*{lost[1]} in {file.name}"):
        read_index(sharded)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": "../b"}}'],
)
def test_a_broken_index_is_named(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json (is no|holds|is not)"):
        read_index(sharded)


# Tensors that do not fit


def test_all_misfits_are_in_one_error(copy):
    tensors = GOLDEN.tensors("model")
    del tensors[f"{BLOCK}0.q_proj.weight"], tensors[f"{BLOCK}1.ff_norm.weight"]
    tensors[f"{BLOCK}0.q_proj.bias"] = np.zeros(64, np.float32)
    tensors["model.transformer.wpe.weight"] = np.zeros((8, 64), np.float32)
    tensors[f"{BLOCK}1.k_proj.weight"] = np.zeros((32, 64), np.float32)
    tensors["model.transformer.ln_f.weight"] = np.zeros(64, np.float64)
    tensors[f"{BLOCK}1.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    write(copy, tensors)
    with pytest.raises(CheckpointError) as caught:
        load_params(copy, CONFIG, "float32")
    message = str(caught.value)
    for part in (
        str(copy),
        "2 missing: ",
        f"{BLOCK}0.q_proj.weight [64, 64]",
        f"{BLOCK}1.ff_norm.weight [64]",
        "2 unknown: ",
        f"{BLOCK}0.q_proj.bias",
        "model.transformer.wpe.weight",
        f"1 of another shape: {BLOCK}1.k_proj.weight is [32, 64], expected [64, 64]",
        "1 of another type than BF16, F16, F32: model.transformer.ln_f.weight is F64",
    ):
        assert part in message
    assert "inv_freq" not in message


def test_a_checkpoint_of_another_size_is_refused_before_memory_is_spent():
    """The wanted model has petabytes."""
    config = dataclasses.replace(CONFIG, num_layers=1000, intermediate_size=1 << 40)
    with pytest.raises(CheckpointError) as caught:
        load_params(GOLDEN.directory, config, "float32")
    message = str(caught.value)
    assert f"{998 * 9} missing: " in message
    assert f" and {998 * 9 - 20} more" in message
    assert message.count("expected [") == 6
    assert len(message) < 4000


def test_a_fitting_index_passes():
    check(CONFIG, read_index(GOLDEN.directory))


# Memory


@pytest.mark.slow
def test_host_memory_above_the_weights_stays_under_two_tensors(tmp_path):
    """A fresh process loads 300 MB with tensors of up to 67 MB; on a CPU the weights are counted off."""
    values = llada_hf_config(CONFIG) | {"d_model": 1024, "n_layers": 8, "mlp_hidden_size": 3072}
    values |= {"vocab_size": 32768, "embedding_size": 32768}
    directory = write_random_checkpoint(tmp_path / "big", values, shard_bytes=100_000_000)
    code = (
        "import json, sys; from pathlib import Path; from benchmarks.checkpoints import measure_load;"
        "print(json.dumps(measure_load(Path(sys.argv[1]), 'auto')))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    result = json.loads(run.stdout)
    assert result["stored_bytes"] > 300_000_000
    assert result["largest_tensor_bytes"] == 32768 * 1024 * 2
    assert result["host_peak_above_weights_bytes"] < 2 * result["largest_tensor_bytes"]
