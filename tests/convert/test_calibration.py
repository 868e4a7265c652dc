"""`jdllm convert --quantize FORM --calibrate FILE`: matrices are rounded by what they multiply."""

import functools
import json
import operator
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from jdllm import cli
from jdllm.checkpoints.calibration.sequences import packs_of
from jdllm.checkpoints.conversion import to_native
from jdllm.checkpoints.loading import load_params
from jdllm.checkpoints.native import compare_checksums, read_manifest
from jdllm.demo import checkpoint_path
from jdllm.errors import ConfigError, RequestError
from jdllm.execution.module import Transformer
from jdllm.models.block import Rows
from jdllm.models.hf_config import config_from_hf
from jdllm.models.layer import Layer, Ranges
from jdllm.models.rotary import rotation_at
from jdllm.models.visibility import key_ranges
from jdllm.models.weights import Params
from jdllm.pallas.attention import attention
from jdllm.quantised import WeightForm, in_order, unpacked
from tests.convert.helpers import contents
from tests.helpers import GOLDENS, ROOT, slow
from tests.rounding import following_by_numpy, rounded_by_gptq

WORDS = (ROOT / "LICENSE").read_text().split()


def text_of(words: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


TEXT = text_of(400, 0)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Recorded models of two or three layers, with a tokenizer: each byte is a token."""

    @functools.cache
    def find(family: str) -> Path:
        directory = tmp_path_factory.mktemp("sources") / family
        shutil.copytree(GOLDENS / family, directory)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(checkpoint_path() / name, directory / name)
        return directory

    return find


@pytest.fixture(scope="module")
def converted(source: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @functools.cache
    def convert(family: str, form: WeightForm) -> Path:
        target = tmp_path_factory.mktemp("calibrated") / f"{family}-{form}"
        to_native(source(family), target, quantize=form, calibrate=[TEXT])
        return target

    return convert


def stored_numbers(native: Path, name: str) -> np.ndarray:
    tensor = next(tensor for tensor in read_manifest(native).tensors if tensor.name == name)
    found = np.fromfile(native / tensor.chunk, np.uint8).reshape(tensor.shape)
    if tensor.dtype == "I8":
        return found.view(np.int8)
    return np.stack([found & 15, found >> 4], axis=-1).reshape(len(found), -1).astype(int) - 8


@pytest.mark.parametrize(
    ("family", "form", "matrices"),
    [
        ("llama", "int4", {"q": "self_attn.q_proj", "down": "mlp.down_proj"}),
        slow("llama", "int8", {"o": "self_attn.o_proj", "up": "mlp.up_proj"}),
    ],
)
def test_matrices_are_rounded_by_the_rows_that_the_rounded_ones_before_make(
    source, converted, family, form, matrices
):
    """The oracle runs both models, and follows and rounds a matrix in float64.

    Packs are of four sequences.
    """
    native, directory = converted(family, form), source(family)
    config, tensors = config_from_hf(native), load_file(directory / "model.safetensors")
    stacks = [load_params(path, config, "float32") for path in (directory, native)]
    ids = list(TEXT.encode())
    pieces = [jnp.array(ids[i : i + 512]) for i in range(0, len(ids), 512)]
    hidden = [[params["embed"][piece] for piece in pieces] for params in stacks]

    @jax.jit
    def pass_layer(weights: Params, h: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        layer, rows = Layer(weights, config), Rows(np.arange(len(h)), *key_ranges(config, 0, len(h)))
        sees = Ranges(rows, rotation_at(config.rope, config.head_dim, rows.positions), attention)
        return layer.matrix_inputs(h, sees), layer.apply(h, sees)[0]

    for layer in range(2):
        inputs = []
        for rows, params in zip(hidden, stacks, strict=True):
            weights = jax.tree.map(operator.itemgetter(layer), params["layers"])
            of_pieces, rows[:] = zip(*(pass_layer(weights, h) for h in rows), strict=True)
            inputs.append(of_pieces)
        for leaf, matrix in matrices.items():
            exact, found = ([np.asarray(piece[leaf]) for piece in of_pieces] for of_pieces in inputs)
            others = []
            for i, (x, y) in enumerate(zip(found, exact, strict=True)):
                pack = np.concatenate(found[i // 4 * 4 :][:4])
                usual = np.median(np.linalg.norm(pack, axis=1))
                shares = 0.5 * np.minimum(1, usual / np.linalg.norm(x, axis=1, keepdims=True)) ** 2
                others.append(x + shares * (y - x))
            found, others = np.concatenate(found), np.concatenate(others)
            name = f"model.layers.{layer}.{matrix}.weight"
            expected, _ = rounded_by_gptq(following_by_numpy(tensors[name], found, others), found, form)
            assert (stored_numbers(native, name) == expected).mean() > 0.98


@pytest.mark.parametrize(
    ("family", "form"),
    [("llada", "int8"), ("llada", "int4"), slow("llama", "int4"), slow("sdar", "int8"), slow("sdar", "int4")],
)
def test_what_the_model_computes_is_closer_than_with_the_nearest_numbers(
    source, converted, family, form, tmp_path
):
    """On another text than the one that it was calibrated with."""
    to_native(source(family), tmp_path / "nearest", quantize=form)
    pack = packs_of([text_of(400, 1)], lambda text: list(text.encode()), config_from_hf(source(family)))[0]
    ids = np.array(pack.tokens[:512])[None]
    plain, found, nearest = (
        np.asarray(Transformer.from_pretrained(path)(ids))
        for path in (source(family), converted(family, form), tmp_path / "nearest")
    )
    assert np.square(found - plain).mean() < 0.5 * np.square(nearest - plain).mean()


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_the_checkpoint_is_one_of_its_form(source, converted, form, tmp_path):
    """Files, names and shapes are those of rounding to nearest, and the numbers are loaded as they are."""
    native = converted("llada", form)
    to_native(source("llada"), tmp_path / "nearest", quantize=form)
    assert contents(native).keys() == contents(tmp_path / "nearest").keys()
    found, expected = (
        [(t.name, t.dtype, t.shape, t.chunk) for t in compare_checksums(path).tensors]
        for path in (native, tmp_path / "nearest")
    )
    assert found == expected
    params = load_params(native, config_from_hf(native).quantised(form), "float32")
    values = params["layers"]["down"].values[1]
    np.testing.assert_array_equal(
        in_order(values) if form == "int8" else unpacked(values),
        stored_numbers(native, "model.transformer.blocks.1.ff_out.weight"),
    )


def test_an_interrupted_conversion_continues_with_the_same_numbers(source, converted, tmp_path):
    """The first run ends behind the first of two layers. The second run keeps this layer."""

    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    target, first = tmp_path / "llada", Path("layers.down.values", "0.0.0")
    with pytest.raises(KeyboardInterrupt):
        to_native(source("llada"), target, quantize="int8", calibrate=[TEXT], progress=stop)
    assert not target.exists()
    written = (tmp_path / "llada.partial" / first).stat().st_mtime_ns
    to_native(source("llada"), target, quantize="int8", calibrate=[TEXT])
    assert (target / first).stat().st_mtime_ns == written
    assert contents(target) == contents(converted("llada", "int8"))


def test_another_text_does_not_continue(source, converted, tmp_path):
    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        to_native(
            source("llada"), tmp_path / "llada", quantize="int8", calibrate=[text_of(400, 1)], progress=stop
        )
    to_native(source("llada"), tmp_path / "llada", quantize="int8", calibrate=[TEXT])
    assert contents(tmp_path / "llada") == contents(converted("llada", "int8"))


# The command


def run(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["convert", *map(str, args)])
    return result.exit_code, result.stdout + result.stderr


def test_the_command_reads_a_text_or_lines_of_json(source, converted, tmp_path):
    plain, lines = tmp_path / "text.txt", tmp_path / "lines.jsonl"
    plain.write_text(TEXT)
    lines.write_text(json.dumps({"text": TEXT, "source": 3}) + "\n\n")
    for file in (plain, lines):
        target = tmp_path / f"from-{file.suffix}"
        code, told = run(source("llada"), target, "--quantize", "int8", "--calibrate", file)
        assert code == 0, told
        assert contents(target) == contents(converted("llada", "int8"))


def test_mistakes_are_told_in_a_line(source, tmp_path):
    good, short, empty, wrong = (tmp_path / name for name in ("a.txt", "b.txt", "c.txt", "d.jsonl"))
    good.write_text(TEXT)
    short.write_text(TEXT[:1000])
    empty.write_text("")
    wrong.write_text('{"text": "a"}\n{"prompt": "b"}\n')
    llada, target = source("llada"), tmp_path / "x"
    before = sorted(tmp_path.iterdir())
    for directory, form, file, said in (
        (llada, None, good, "--calibrate says how --quantize rounds: give --quantize too"),
        (llada, "fp8", good, "calibrate is for quantize int8 or int4, and quantize is fp8"),
        (llada, "int4", tmp_path / "none", "none cannot be read: No such file"),
        (llada, "int4", short, "has 1000 tokens, expected at least 1024"),
        (llada, "int4", empty, "has 0 tokens, expected at least 1024"),
        (llada, "int4", wrong, 'd.jsonl, line 2: expected such as {"text": "..."}'),
        (GOLDENS / "llada", "int4", good, "has no tokenizer (tokenizer.json)"),
        (GOLDENS / "llada_moe", "int4", good, "which is for models without experts"),
    ):
        options = ["--calibrate", file] + ([] if form is None else ["--quantize", form])
        code, told = run(directory, target, *options)
        assert (code, told.count("\n")) == (2, 1), told
        assert said in told
    assert sorted(tmp_path.iterdir()) == before


def test_a_model_that_denoises_needs_a_mask(source, tmp_path):
    directory = shutil.copytree(source("llada"), tmp_path / "llada")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        values = (directory / name).read_text().replace("<|mdm_mask|>", "<|other|>")
        (directory / name).write_text(values.replace("mask_token_id", "other_id"))
    with pytest.raises(ConfigError, match="mask_token_id"):
        to_native(directory, tmp_path / "x", quantize="int4", calibrate=[TEXT])


def test_texts_need_a_form(source, tmp_path):
    with pytest.raises(RequestError, match="calibrate is for quantize int8 or int4, and quantize is None"):
        to_native(source("llada"), tmp_path / "x", calibrate=[TEXT])
