"""LoRA adapters that are merged into weights: what PEFT makes of them, and what is refused."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

from jdllm.checkpoints.conversion import to_native
from jdllm.checkpoints.index import Index, StoredTensor
from jdllm.checkpoints.loading import load_params, read_index
from jdllm.checkpoints.merging import merged
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import CheckpointError
from jdllm.llm import LLM
from jdllm.loaded_model import load_model
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import HOST_LAYERS
from tests.helpers import GOLDENS, Golden

LORA, LLAMA = GOLDENS / "lora", GOLDENS / "llama"
BASES = {"linear": "llama", "stabilised": "qwen2", "embeddings": "llama"}
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
SMALL: dict[str, Any] = {"max_num_batched_tokens": 64, "kv_pool": "1MiB", "progress": False}


def whole(stored: StoredTensor) -> np.ndarray:
    return stored.read(stored.whole)


def read_merged(adapter: Path, base: Path = LLAMA) -> Index:
    return merged(read_index(base), adapter, config_from_hf(base))


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., Path]:
    """Returns an adapter with other settings, or with other tensors."""

    def changed(
        name: str = "linear",
        change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda tensors: tensors,
        **values: Any,
    ) -> Path:
        path = tmp_path / "adapter"
        shutil.copytree(LORA / name, path, copy_function=shutil.copyfile)
        (path / CONFIG).write_text(json.dumps(json.loads((path / CONFIG).read_text()) | values))
        save_file(change(load_file(path / WEIGHTS)), path / WEIGHTS)
        return path

    return changed


@pytest.mark.parametrize("name", BASES)
def test_tokens_and_logits_are_those_of_the_merged_model(name: str):
    told = Golden(f"lora/{name}").tensors()
    prompt, output = (told[key].tolist() for key in ("prompt", "output"))
    sampling = SamplingParams(max_tokens=16, early_stop=False)
    with LLM(GOLDENS / BASES[name], dtype="float32", adapter=LORA / name, **SMALL) as llm:
        np.testing.assert_allclose(llm.logits([prompt])[0], told["logits"], atol=2e-4, rtol=1e-4)
        [answer] = llm.generate(prompt_token_ids=[prompt], sampling=sampling)
    assert [*prompt, *answer.token_ids] == output


@pytest.mark.parametrize(("name", "rounding"), [(name, 1e-6) for name in BASES] + [("pattern", 2**-8)])
def test_weights_are_those_of_the_merged_model(name: str, rounding: float, tmp_path: Path):
    """In bfloat16 the sum is rounded once. In float32 the last bit of the product, below 1, may differ."""
    base = GOLDENS / BASES.get(name, "llama")
    if name == "pattern":
        to_native(base, tmp_path / "halved", dtype="bfloat16")
        base = tmp_path / "halved"
    index, told = read_merged(LORA / name, base), Golden(f"lora/{name}").tensors()
    for key in told.keys() - {"prompt", "logits", "output"}:
        found = whole(index[key])
        assert found.dtype == told[key].dtype
        expected = told[key].astype(np.float32)
        np.testing.assert_allclose(found.astype(np.float32), expected, rtol=rounding, atol=2**-24)


def random_adapter(
    directory: Path, base: Path, shapes: dict[str, int], **values: Any
) -> dict[str, np.ndarray]:
    """Write an adapter of matrices of a checkpoint, with these ranks. Returns the products B A in float64."""
    rng, stored, tensors, products = np.random.default_rng(5), read_index(base), {}, {}
    for name, rank in shapes.items():
        outputs, inputs = stored[name].shape
        a, b = (
            rng.standard_normal(shape).astype(np.float32) / 4 for shape in ((rank, inputs), (outputs, rank))
        )
        module = PREFIX + name.removesuffix("weight")
        tensors |= {f"{module}lora_A.default.weight": a, f"{module}lora_B.default.weight": b}
        products[name] = b.astype(np.float64) @ a.astype(np.float64)
    directory.mkdir()
    save_file(tensors, directory / WEIGHTS)
    (directory / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16, **values}))
    return products


@pytest.mark.parametrize(
    ("base", "rounding"),
    [("llada2", 2**-23), ("llada_moe", 2**-23), ("quantised/int4", 2**-10), ("quantised/nf4", 2**-7)],
)
def test_any_matrix_of_a_checkpoint_has_its_product(base: str, rounding: float, tmp_path: Path):
    """Also experts, queries, keys and values in one matrix, and quantised matrices, which stay in 16 bits."""
    path, plain = GOLDENS / base, read_index(GOLDENS / base)
    some = [
        name for name in plain if "layers.1." in name and "_norm" not in name and len(plain[name].shape) == 2
    ]
    products = random_adapter(
        tmp_path / "adapter",
        path,
        {name: 3 + number % 3 for number, name in enumerate(some)},
        target_modules=[name.removesuffix(".weight") for name in some],
        rank_pattern={
            re.escape(name.removesuffix(".weight")): 3 + number % 3 for number, name in enumerate(some)
        },
    )
    index = read_merged(tmp_path / "adapter", path)
    assert products
    for name, stored in plain.items():
        before, found = whole(stored), whole(index[name])
        assert found.dtype == before.dtype
        if name not in products:
            np.testing.assert_array_equal(found, before)
            continue
        expected = before.astype(np.float64) + 16 / (3 + some.index(name) % 3) * products[name]
        np.testing.assert_allclose(found.astype(np.float64), expected, rtol=rounding, atol=2e-6)


@pytest.mark.parametrize("base", ["llama", "llada2"])
def test_every_way_to_load_gives_the_same_weights(base: str, tmp_path: Path):
    path, adapter, config = GOLDENS / base, tmp_path / "adapter", config_from_hf(GOLDENS / base)
    names = [name for name in read_index(path) if re.search(r"query_key_value|[qo]_proj|experts\.1\.", name)]
    random_adapter(adapter, path, dict.fromkeys(names, 8), target_modules="All-Linear")
    params = load_params(path, config, "float32", adapter=adapter)
    to_native(path, tmp_path / "native", adapter=adapter)
    to_native(path, tmp_path / "plain")
    for found in (
        load_params(tmp_path / "native", config, "float32"),
        load_params(tmp_path / "plain", config, "float32", adapter=adapter),
    ):
        jax.tree.map(np.testing.assert_array_equal, found, params)
    in_part = load_params(path, dataclasses.replace(config, offloaded=1), "float32", adapter=adapter)
    for name, leaf in params["layers"].items():
        parts = [in_part[stack][name] for stack in ("layers", HOST_LAYERS) if stack in in_part]
        np.testing.assert_array_equal(np.concatenate(parts), leaf)


def test_any_part_is_a_part_of_the_whole():
    stored = read_merged(LORA / "linear")["model.layers.1.mlp.down_proj.weight"]
    values, later = whole(stored), stored.rows(5, 59)
    for rows, columns in (
        (slice(59), slice(160)),
        (slice(5, 9), slice(30, 160)),
        (slice(58, 59), slice(2, 9)),
    ):
        part = [range(size)[of] for size, of in zip((59, 160), (rows, columns), strict=True)]
        np.testing.assert_array_equal(stored.read(part), values[rows, columns])
        np.testing.assert_array_equal(later.read(part), values[5:][rows, columns])


def with_base(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As PEFT saves an adapter of the embedding by default."""
    base = np.asarray(2 * load_file(LLAMA / "model.safetensors")["model.embed_tokens.weight"], bfloat16)
    return tensors | {f"{PREFIX}model.embed_tokens.base_layer.weight": base}


def test_an_embedding_is_the_one_of_the_adapter_with_its_product(adapter: Callable[..., Path]):
    path = adapter("embeddings", with_base)
    tensors = load_file(path / WEIGHTS)
    module = f"{PREFIX}model.embed_tokens."
    a, b = (tensors[f"{module}lora_embedding_{matrix}"].astype(np.float64) for matrix in "AB")
    found = read_merged(path)["model.embed_tokens.weight"]
    expected = tensors[f"{module}base_layer.weight"].astype(np.float64) + 6 / 4 * (b @ a).T
    assert found.dtype == "F32"
    np.testing.assert_allclose(whole(found), expected, atol=1e-6)
    part = found.read([range(100, 300), range(7, 20)])
    np.testing.assert_array_equal(part, whole(found)[100:300, 7:20])


def test_weights_in_host_memory_are_merged_too():
    whole_model, in_part = (
        load_model(
            LLAMA,
            "float32",
            {},
            lambda *_, count=count: count,
            lambda *_: False,
            load_weights=True,
            progress=False,
            adapter=LORA / "linear",
        )
        for count in (0, 1)
    )
    assert in_part.config.offloaded == 1
    for name, leaf in whole_model.params["layers"].items():
        parts = [in_part.params[stack][name] for stack in ("layers", HOST_LAYERS)]
        np.testing.assert_array_equal(np.concatenate(parts), leaf)


def test_a_module_that_an_adapter_has_anew_has_no_product(adapter: Callable[..., Path]):
    module, new = f"{PREFIX}model.layers.0.mlp.up_proj", np.ones((160, 64), np.float32)

    def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        others = {name: value for name, value in tensors.items() if not name.startswith(module)}
        return others | {f"{module}.weight": new}

    path = adapter("linear", change, modules_to_save=["layers.0.mlp.up_proj"])
    np.testing.assert_array_equal(whole(read_merged(path)["model.layers.0.mlp.up_proj.weight"]), new)


def test_rows_of_a_tensor_that_an_adapter_has_anew(tmp_path: Path):
    path, name = GOLDENS / "llada2", "model.layers.0.attention.query_key_value.weight"
    config, new = config_from_hf(path), np.asarray(whole(read_index(path)[name])[::-1], bfloat16)
    random_adapter(tmp_path / "adapter", path, {}, modules_to_save=["layers.0.attention.query_key_value"])
    save_file({PREFIX + name: np.ascontiguousarray(new)}, tmp_path / "adapter" / WEIGHTS)
    params = load_params(path, config, "float32", adapter=tmp_path / "adapter")
    rows = np.concatenate([params["dense_layers"][leaf][0] for leaf in "qkv"])
    np.testing.assert_array_equal(rows, new.astype(np.float32))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
        ({"bias": "all"}, "bias is 'all', expected 'none'"),
        ({"use_dora": True}, "use_dora is True, expected False"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True, expected False"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', expected True"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is .* expected None"),
        ({"target_parameters": ["x"]}, "target_parameters is .* expected None"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is .* expected None"),
        ({"r": 0}, "r is 0, expected a positive integer"),
        ({"rank_pattern": {"q_proj": "2"}}, "rank_pattern of q_proj is '2', expected a positive integer"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern of q_proj is None, expected a number"),
        ({"rank_pattern": [2]}, r"rank_pattern is \[2\], expected an object"),
        ({"rank_pattern": {"q_(": 2}}, r"'q_\(' is no regular expression"),
        ({"target_modules": 5}, "target_modules is 5, expected names or a pattern"),
        ({"target_modules": ["c_attn"]}, r"target_modules is \['c_attn'\], and the model has no such matrix"),
        ({"layers_to_transform": "0"}, "layers_to_transform is '0', expected numbers"),
        (
            {"rank_pattern": {}},
            r"10 of another shape: .*q_proj.lora_A.weight is \[2, 64\], expected \[4, 64\]",
        ),
        ({"target_modules": ["q_proj"]}, r"24 unknown: .*down_proj"),
        ({"modules_to_save": ["norm"]}, r"5 missing: base_model\.model\.model\.layers\.0\.input_layernorm"),
    ],
)
def test_settings_that_are_not_followed(adapter: Callable[..., Path], values: dict[str, Any], told: str):
    with pytest.raises(CheckpointError, match=told):
        read_merged(adapter("linear", **values))


NAME = f"{PREFIX}model.layers.0.mlp.up_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda x: {key: value for key, value in x.items() if key != NAME}, rf"1 missing: {NAME}"),
        (lambda x: x | {NAME: x[NAME][1:]}, rf"{NAME} is \[159, 4\], expected \[160, 4\]"),
        (lambda x: x | {NAME: x[NAME].astype(np.int32)}, rf"1 of another type .*: {NAME} is I32"),
        (lambda x: x | {f"{PREFIX}model.layers.2.up_proj.lora_B.weight": x[NAME]}, r"1 unknown: .*layers\.2"),
        (
            lambda x: x | {f"{PREFIX}model.norm.weight": np.ones(32, np.float32)},
            r"is \[32\], expected \[64\]",
        ),
    ],
    ids=["missing", "mis-shaped", "integers", "unknown", "new"],
)
def test_tensors_that_do_not_fit(adapter: Callable[..., Path], change: Any, told: str):
    with pytest.raises(CheckpointError, match=told):
        read_merged(adapter("linear", change))


def test_a_tied_embedding_is_refused(adapter: Callable[..., Path]):
    with pytest.raises(
        CheckpointError, match=r"has .*(embed_tokens|lm_head).*, and config.json ties the head"
    ):
        read_merged(adapter("embeddings"), GOLDENS / "qwen2")


def test_directories_without_an_adapter(adapter: Callable[..., Path]):
    for path in (LLAMA, LORA / "nowhere"):
        with pytest.raises(CheckpointError, match=r"holds no adapter: expected .* adapter_config\.json"):
            read_merged(path)
    path = adapter()
    (path / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match=r"Git LFS pointer.*git lfs pull"):
        read_merged(path)
    (path / WEIGHTS).rename(path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin, a pickle of PyTorch.* save_pretrained"):
        read_merged(path)
