"""Native checkpoints: what Orbax and jdllm read from them, and how damage is met."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jdllm.checkpoints.conversion import to_native
from jdllm.checkpoints.loading import load_params, read_index, resolve_dtype
from jdllm.checkpoints.native import compare_checksums, is_native, read_manifest
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import CheckpointError
from jdllm.llm import LLM
from jdllm.models.hf_config import config_from_hf
from tests.helpers import Golden

GOLDEN = Golden("llada")
CONFIG = config_from_hf(GOLDEN.directory)
ROOT = Path(__file__).parents[2]
FAMILIES = ["llada", "llada2", "llada_moe", "dream", "llama", "mistral", "qwen2"]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("native") / "llada"
    to_native(GOLDEN.directory, target)
    return target


@pytest.fixture
def copy(native: Path, tmp_path: Path) -> Path:
    """A native checkpoint that a test may damage."""
    return Path(shutil.copytree(native, tmp_path / "copy"))


def assert_same_trees(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)

    def compare(a: Any, b: Any) -> None:
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    jax.tree.map(compare, actual, expected)


# Orbax


def stacked(tensors: dict[str, np.ndarray], pattern: str, *counts: int) -> np.ndarray:
    """Tensors of all layers (and experts) as one array, by the published names."""
    values = [tensors[pattern.format(*place)] for place in np.ndindex(*counts)]
    return np.stack(values).reshape(*counts, *values[0].shape)


@pytest.mark.parametrize("checkpointer", [ocp.StandardCheckpointer, ocp.PyTreeCheckpointer])
def test_orbax_restores_the_stacked_tensors(native, checkpointer):
    tensors = GOLDEN.tensors("model")
    block = "model.transformer.blocks.{}."
    names = {"attn_norm": "attn_norm", "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "attn_out"}
    names |= {"ffn_norm": "ff_norm", "gate": "ff_proj", "up": "up_proj", "down": "ff_out"}
    expected = {
        "embed": tensors["model.transformer.wte.weight"],
        "layers": {
            leaf: stacked(tensors, f"{block}{name}.weight", CONFIG.num_layers) for leaf, name in names.items()
        },
        "final_norm": tensors["model.transformer.ln_f.weight"],
        "head": tensors["model.transformer.ff_out.weight"],
    }
    with checkpointer() as reader:
        assert_same_trees(reader.restore(native), expected)


def test_orbax_restores_experts_in_the_order_of_the_model(tmp_path):
    """Their matrices are transposed in the parameter tree, and not in the files."""
    golden = Golden("llada_moe")
    to_native(golden.directory, tmp_path / "native")
    tensors, config = golden.tensors("model"), golden.json("config")
    layers, experts = config["num_hidden_layers"], config["num_experts"]
    with ocp.StandardCheckpointer() as reader:
        restored = reader.restore(tmp_path / "native")["layers"]
    for leaf, name in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
        expected = stacked(tensors, f"model.layers.{{}}.mlp.experts.{{}}.{name}.weight", layers, experts)
        np.testing.assert_array_equal(restored[f"experts_{leaf}"], expected.swapaxes(-1, -2))
    expected = stacked(tensors, "model.layers.{}.self_attn.o_proj.weight", layers)
    np.testing.assert_array_equal(restored["o"], expected)


def test_orbax_restores_one_array_of_one_tensor(tmp_path):
    """Queries, keys and values of a layer are rows of it, and stay so."""
    golden = Golden("llada2")
    to_native(golden.directory, tmp_path / "native")
    with ocp.StandardCheckpointer() as reader:
        restored = reader.restore(tmp_path / "native")
    name, tensors = "model.layers.{}.attention.query_key_value.weight", golden.tensors("model")
    np.testing.assert_array_equal(restored["dense_layers"]["q_k_v"], stacked(tensors, name, 1))
    np.testing.assert_array_equal(restored["layers"]["q_k_v"], stacked(tensors, name, 3)[1:])
    assert {"q", "k", "v"}.isdisjoint(restored["layers"])


def test_orbax_restores_onto_devices(native):
    expected = load_params(native, CONFIG, "float32")
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), expected)
    with ocp.StandardCheckpointer() as reader:
        restored = reader.restore(native, abstract)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))
    assert_same_trees(restored, expected)


def test_jdllm_needs_neither_orbax_nor_tensorstore():
    used = "{'orbax', 'tensorstore'} & sys.modules.keys()"
    code = f"import sys, jdllm.checkpoints.conversion; sys.exit(bool({used}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# Loading


@pytest.mark.parametrize("family", FAMILIES)
def test_both_formats_load_alike(tmp_path, family):
    source, target = Golden(family).directory, tmp_path / "native"
    to_native(source, target)
    assert is_native(target)
    assert not is_native(source)
    config = config_from_hf(source)
    assert config_from_hf(target) == config
    for dtype in ("float32", "bfloat16"):
        assert_same_trees(load_params(target, config, dtype), load_params(source, config, dtype))


def test_the_type_of_the_checkpoint_is_found(native):
    assert resolve_dtype(native, config_from_hf(native), "auto") == "float32"
    assert read_manifest(native).dtype == "float32"


def test_a_model_runs_from_either_format(native, llm):
    ids, sampling = [[5, 6, 7]], SamplingParams(gen_length=8, steps=4)
    expected = llm.generate(prompt_token_ids=ids, sampling=sampling)[0].token_ids
    model = LLM(native, max_num_batched_tokens=128)
    assert model.generate(prompt_token_ids=ids, sampling=sampling)[0].token_ids == expected


SHARDED = """
    import sys, jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from pathlib import Path
    from jdllm.models.hf_config import config_from_hf
    from jdllm.checkpoints import loading
    from jdllm.checkpoints.loading import load_params

    loading.PIECE_BYTES = 3000
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))

    def same(leaf, sharding, expected):
        assert leaf.sharding == sharding
        moved = jax.device_put(expected, sharding)
        for mine, other in zip(leaf.addressable_shards, moved.addressable_shards, strict=True):
            assert (mine.device, mine.index) == (other.device, other.index)
            np.testing.assert_array_equal(np.asarray(mine.data), np.asarray(other.data))

    path = Path(sys.argv[1])
    config = config_from_hf(path)
    whole = load_params(path, config, "float32")
    even = lambda node: all(x.shape[0] % 2 == 0 for x in jax.tree.leaves(node))
    axes_of = lambda x, axes: ([None] * x.ndim + [*axes])[-x.ndim:] if even(x) else []
    last_axes = lambda *axes: lambda x: NamedSharding(mesh, P(*axes_of(x, axes)))
    shardings = [
        NamedSharding(mesh, P()),
        {key: NamedSharding(mesh, P("a") if even(node) else P()) for key, node in whole.items()},
        jax.tree.map(last_axes("b", "a"), whole),
        jax.tree.map(last_axes(("a", "b")), whole),
    ]
    for sharding in shardings:
        params = load_params(path, config, "float32", sharding=sharding)
        jax.tree.map(same, params, jax.tree.broadcast(sharding, params), whole)
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llada_moe", "llada2"])
def test_shards_are_loaded_onto_their_devices(tmp_path, family):
    """Four devices hold what `device_put` of whole leaves would put there.

    Experts are transposed, and queries, keys and values of LLaDA2 are rows of one tensor.
    """
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    to_native(Golden(family).directory, tmp_path / "native")
    command = [sys.executable, "-c", textwrap.dedent(SHARDED), str(tmp_path / "native")]
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


# Damage


def test_a_flipped_bit_is_found(copy):
    assert len(compare_checksums(copy).tensors) == len(GOLDEN.tensors("model"))
    chunk = copy / "layers.up" / "1.0.0"
    content = bytearray(chunk.read_bytes())
    content[1000] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        compare_checksums(copy)
    assert "model.transformer.blocks.1.up_proj.weight in layers.up/1.0.0" in str(caught.value)
    assert "blocks.0" not in str(caught.value)


def test_missing_and_cut_chunks_are_all_named(copy):
    (copy / "embed" / "0.0").unlink()
    os.truncate(copy / "layers.q" / "0.0.0", 100)
    for read in (
        lambda: load_params(copy, CONFIG, "float32"),
        lambda: compare_checksums(copy),
        lambda: read_index(copy),
    ):
        with pytest.raises(CheckpointError, match=r"layers\.q/0\.0\.0 .*embed/0\.0 "):
            read()


def test_a_checkpoint_that_does_not_fit_its_configuration_is_named(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"mlp_hidden_size": 8}))
    with pytest.raises(CheckpointError, match=f"tensors of {copy} do not fit"):
        load_params(copy, config_from_hf(copy), "float32")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 3, "jdllm": "9.1"}, "format version 3.*reads 1 and 2.*jdllm 9.1"),
        ({"format": "other"}, "no manifest of a native checkpoint.*other"),
        ({"tensors": 5}, "no manifest"),
        ({"files": {}}, "lacks the files.*model.safetensors"),
        ({"tensors": [{}]}, "no manifest.*'"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(copy, change, said):
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | change))
    with pytest.raises(CheckpointError, match=said):
        load_params(copy, CONFIG, "float32")


@pytest.mark.parametrize(
    "change",
    [
        {"chunk": "../x"},
        {"chunk": "/etc/passwd"},
        {"file": "../x.safetensors"},
        {"dtype": "I8"},
        {"shape": [-1]},
        {"shape": 4},
        {"shape": ["4"]},
    ],
)
def test_a_tensor_that_cannot_be_is_refused(copy, change):
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["tensors"][3] |= change
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"manifest\.json is (no|not)"):
        read_manifest(copy)


def test_a_manifest_that_is_cut_is_refused(copy):
    os.truncate(copy / "manifest.json", 1000)
    with pytest.raises(CheckpointError, match=r"manifest\.json is (no|not)"):
        load_params(copy, CONFIG, "float32")


def test_only_native_checkpoints_are_verified():
    with pytest.raises(CheckpointError, match="no native checkpoint"):
        compare_checksums(GOLDEN.directory)
