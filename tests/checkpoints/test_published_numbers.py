"""Numbers of quantised checkpoints that go to the device as they are."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jdllm.checkpoints import loading
from jdllm.checkpoints.conversion import to_hf, to_native
from jdllm.checkpoints.default_form import default_form
from jdllm.checkpoints.index import DTYPES
from jdllm.checkpoints.loading import load_params, read_index
from jdllm.models.hf_config import config_from_hf, read_config
from jdllm.models.weights import is_spec, param_bytes, spec_tree, tree_bytes
from jdllm.quantised import Quantised, WeightForm
from tests.helpers import GOLDENS, slow
from tests.published import SCHEMES, Parts, Scheme, plain_checkpoint, publish

QUANTISED = GOLDENS / "quantised"
UP = "model.transformer.blocks.1.up_proj.weight"
"""Of 256 outputs and 128 inputs."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain_checkpoint(tmp_path_factory.mktemp("published") / "plain")


def form_of(path: Path, **changed: Any) -> WeightForm | None:
    config = dataclasses.replace(config_from_hf(path), **changed)
    found = default_form(path, config, read_config(path))
    assert not found.in_int8
    return found.form


def in_few_bits(path: Path, form: WeightForm) -> dict[str, np.ndarray]:
    """The values of the matrices on the device, by the names of their sources; in float32."""
    config = config_from_hf(path).quantised(form)
    params, found = load_params(path, config, "bfloat16"), {}
    assert tree_bytes(params) == param_bytes(config, "bfloat16")

    def add(spec: Any, leaf: Any) -> None:
        if spec.quantised:
            assert isinstance(leaf, Quantised)
            values = np.asarray(leaf.dequantised(jnp.dtype("float32")))
            found.update({name: values[place] for name, place in spec.sources()})

    jax.tree.map(add, spec_tree(config), params, is_leaf=is_spec)
    return found


@pytest.mark.parametrize(
    ("name", "piece_bytes"), [*((name, 1 << 20) for name in SCHEMES), ("gptq", 3000), ("w8a16", 3000)]
)
def test_no_number_is_rounded_again(
    name: str, piece_bytes: int, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The 16-bit values, of which those of the libraries are known, are the exact ones, rounded once."""
    monkeypatch.setattr(loading, "PIECE_BYTES", piece_bytes)
    path, scheme = tmp_path / name, SCHEMES[name]
    matrices = publish(plain, path, scheme)
    assert form_of(path) == scheme.form
    index, found = read_index(path), in_few_bits(path, scheme.form)
    assert found.keys() == matrices.keys()
    for tensor, matrix in matrices.items():
        np.testing.assert_array_equal(found[tensor], matrix.kept(scheme.form))
        stored = index[tensor]
        rounded = matrix.values.astype(DTYPES[stored.dtype])
        np.testing.assert_array_equal(stored.read(stored.whole), rounded)


@pytest.mark.parametrize("name", ["int8_channel", "ao_int8"])
def test_checkpoints_of_libraries(name: str):
    path = QUANTISED / name
    assert form_of(path) == "int8"
    index = read_index(path)
    for tensor, values in in_few_bits(path, "int8").items():
        stored = index[tensor]
        np.testing.assert_array_equal(values.astype(DTYPES[stored.dtype]), stored.read(stored.whole))


@pytest.mark.parametrize("name", ["gptq", "gptq_v2", "awq", "int4", "int4_asymmetric", "ao_int4", "ao_intx4"])
def test_checkpoints_of_libraries_in_small_groups_or_with_zeros(name: str):
    """A step is a 15th of the largest number of a row at least; scales and offsets are rounded to 16 bits."""
    path = QUANTISED / name
    assert form_of(path) == "uint4"
    index = read_index(path)
    for tensor, values in in_few_bits(path, "uint4").items():
        exact = index[tensor].read(index[tensor].whole).astype(np.float32)
        assert (np.abs(values - exact) <= np.abs(exact).max(axis=1, keepdims=True) / 100).all()


def test_a_checkpoint_of_bitsandbytes():
    """The library multiplies by the largest number of a row first, and by 1 / 127 then."""
    path = QUANTISED / "int8_rows"
    assert form_of(path) == "int8"
    tensors = load_file(path / "model.safetensors")
    for name, values in in_few_bits(path, "int8").items():
        scales = tensors[f"{name.removesuffix('weight')}SCB"] * np.float32(1 / 127)
        np.testing.assert_array_equal(values, tensors[name] * scales[:, None])


@pytest.mark.parametrize("name", ["int8", "fp8_dynamic"])
def test_experts_keep_their_numbers(name: str, tmp_path: Path):
    path, scheme = tmp_path / name, SCHEMES[name]
    matrices = publish(GOLDENS / "llada_moe", path, scheme)
    assert form_of(path) == scheme.form
    found = in_few_bits(path, scheme.form)
    assert found.keys() == matrices.keys()
    for tensor, matrix in matrices.items():
        np.testing.assert_array_equal(found[tensor], matrix.values)


def test_rows_of_a_tensor_have_its_numbers(plain: Path, tmp_path: Path):
    for name in ("gptq_8", "w4a16", "ao_int4"):
        publish(plain, tmp_path / name, SCHEMES[name])
        stored = read_index(tmp_path / name)[UP]
        whole, rows = (one.numbers_in(SCHEMES[name].form) for one in (stored, stored.rows(40, 100)))
        assert whole is not None
        assert rows is not None
        for part, of_whole in zip(rows.parts, whole.parts, strict=True):
            others = part.whole[1:]
            expected = of_whole.read([range(50, 60), *others])
            np.testing.assert_array_equal(part.read([range(10, 20), *others]), expected)


def of_groups(name: str, group: int) -> Scheme:
    return SCHEMES[name]._replace(group=group)


def of_one_matrix(change: Callable[[Parts], Parts]) -> Callable[[str, Parts], Parts]:
    return lambda name, parts: change(parts) if name == UP else parts


def with_zero(parts: Parts, name: str, value: int) -> Parts:
    changed = parts[name].copy()
    changed.flat[3] += value
    return parts | {name: changed}


def with_zeros(parts: Parts, value: int) -> Parts:
    """Zero points of compressed-tensors, packed along rows: 8 for each zero."""
    words = np.full((32, 1), 0x88888888, np.uint32).view(np.int32)
    return with_zero(parts | {"weight_zero_point": words}, "weight_zero_point", value)


def ordered(parts: Parts) -> Parts:
    return parts | {"g_idx": parts["g_idx"][np.random.default_rng(0).permutation(256)]}


KEPT: dict[str, tuple[Scheme, Callable[[str, Parts], Parts]]] = {
    "no order": (SCHEMES["gptq"], of_one_matrix(lambda parts: {k: parts[k] for k in parts if k != "g_idx"})),
    "zeros": (SCHEMES["w4a16"], of_one_matrix(lambda parts: with_zeros(parts, 0))),
    "a scale for all": (
        SCHEMES["int8"],
        of_one_matrix(lambda parts: parts | {"weight_scale": parts["weight_scale"][:1, 0]}),
    ),
}

IN_16_BITS: dict[str, tuple[Scheme, Callable[[str, Parts], Parts]]] = {
    "groups of 16": (of_groups("gptq", 16), lambda _, parts: parts),
    "8 bits in groups": (of_groups("gptq_8", 128), lambda _, parts: parts),
    "an order": (SCHEMES["gptq"], lambda name, parts: ordered(parts) if "ff_out" in name else parts),
    "another zero of 8 bits": (SCHEMES["gptq_8"], of_one_matrix(lambda parts: with_zero(parts, "qzeros", 1))),
    "a zero of torchao": (
        SCHEMES["ao_int8"],
        of_one_matrix(lambda parts: with_zero(parts, "_weight_zero_point", 1)),
    ),
    "another form": (
        SCHEMES["gptq_rows"],
        of_one_matrix(lambda parts: {"weight": np.ones((256, 128), np.float16)}),
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_else_has_a_form(name: str, plain: Path, tmp_path: Path):
    scheme, change = KEPT[name]
    publish(plain, tmp_path / "found", scheme, change)
    assert form_of(tmp_path / "found") == scheme.form
    index = read_index(tmp_path / "found")
    for tensor, values in in_few_bits(tmp_path / "found", scheme.form).items():
        stored = index[tensor]
        np.testing.assert_array_equal(values.astype(DTYPES[stored.dtype]), stored.read(stored.whole))


@pytest.mark.parametrize("name", IN_16_BITS)
def test_one_matrix_that_does_not_fit_leaves_all_in_16_bits(name: str, plain: Path, tmp_path: Path):
    scheme, change = IN_16_BITS[name]
    publish(plain, tmp_path / "found", scheme, change)
    assert form_of(tmp_path / "found") is None


@pytest.mark.parametrize("zeros", ["gptq", "w4a16"])
def test_one_matrix_with_a_zero_leaves_all_in_4_bits(zeros: str, plain: Path, tmp_path: Path):
    """The others have no zeros and groups of 128, which are groups of 32, too."""
    part = {"gptq": lambda parts: with_zero(parts, "qzeros", 1), "w4a16": lambda parts: with_zeros(parts, 1)}
    matrices = publish(plain, tmp_path / "found", SCHEMES[zeros], of_one_matrix(part[zeros]))
    assert form_of(tmp_path / "found") == "uint4"
    for tensor, values in in_few_bits(tmp_path / "found", "uint4").items():
        expected = matrices[tensor].kept("uint4")
        assert (values == expected).all() == (tensor != UP)
        assert (values != expected).any(axis=1).sum() <= 1


@pytest.mark.parametrize("name", ["gptq_ordered", "int3", "nf4", "fp8_channel"])
def test_numbers_of_other_kinds_are_in_16_bits(name: str):
    assert form_of(QUANTISED / name) is None


def test_models_that_cannot_be_in_few_bits(plain: Path, tmp_path: Path):
    publish(plain, tmp_path / "gptq", SCHEMES["gptq"])
    assert form_of(tmp_path / "gptq", cards=2) is None
    llama, adapter = tmp_path / "llama", GOLDENS / "lora" / "linear"
    publish(GOLDENS / "llama", llama, SCHEMES["gptq_rows"])
    assert form_of(llama) == "int4"
    assert default_form(llama, config_from_hf(llama), read_config(llama), adapter).form is None


@pytest.mark.parametrize(
    ("name", "form"), [("gptq", "int8"), slow("w8a16", "int4"), slow("ao_intx4", "int8")]
)
def test_another_form_is_rounded_again(name: str, form: WeightForm, plain: Path, tmp_path: Path):
    """The 16-bit values are, of which the libraries' are known."""
    publish(plain, tmp_path / name, SCHEMES[name])
    to_native(tmp_path / name, tmp_path / "native")
    found, expected = (in_few_bits(tmp_path / one, form) for one in (name, "native"))
    for tensor, values in expected.items():
        np.testing.assert_array_equal(found[tensor], values)


@pytest.mark.parametrize("name", ["gptq", "gptq_8", "w4a16", "ao_int8", "awq", "w4a16_zeros"])
def test_a_native_checkpoint_stores_the_same_numbers(name: str, plain: Path, tmp_path: Path):
    scheme = SCHEMES[name]
    matrices = publish(plain, tmp_path / name, scheme)
    to_native(tmp_path / name, tmp_path / "native", quantize=scheme.form, dtype="float32")
    to_hf(tmp_path / "native", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    for tensor, matrix in matrices.items():
        np.testing.assert_array_equal(back[tensor], matrix.kept(scheme.form))
