"""The operators' benchmarks in miniature: what they measure is right, peers may be missing, ours may not."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.operators import attention, grouped_matmul, quantised_matmul, skinny_matmul
from benchmarks.record import Sustained
from benchmarks.shapes import SHAPES
from jdllm.engine_options import QUANTIZATIONS
from jdllm.pallas.quantised_matmul.tiles import default_tiles as default_cut
from jdllm.pallas.skinny_matmul.tiles import default_tiles
from jdllm.quantised import KINDS, Grouped, Quantised, Shifted, WeightForm
from tests.benchmarks.shapes import small


@pytest.fixture(autouse=True)
def miniature(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grouped_matmul, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(attention, "LEAST_SECONDS", 1e-3)
    monkeypatch.setattr(attention, "CALL_SECONDS", 3e-5)
    monkeypatch.setattr(attention, "HEAD_DIM", 16)
    monkeypatch.setattr(attention, "PACKED", (20, 1, 19))
    monkeypatch.setattr(attention, "sustained", lambda run: Sustained(1.0, {"watts": float(run().size)}))
    monkeypatch.setattr(grouped_matmul, "SIDES", {"gated": (24, 16), "down": (16, 24)})
    monkeypatch.setattr(grouped_matmul, "GROUPS", 4)
    monkeypatch.setitem(sys.modules, "tokamax", None)


class TestAttention:
    @pytest.mark.slow
    def test_shapes_and_forms(self, capsys: pytest.CaptureFixture[str]):
        table = attention.measure([40, 8], [(4, 2)], ["tokamax", "xla"])
        assert [(row["rows"], row["segments"]) for row in table] == [(40, 1), (8, 1), (40, 3)]
        flops = [4 * pairs * 4 * 16 for pairs in (40**2, 8**2, 20**2 + 1 + 19**2)]
        for row, count in zip(table, flops, strict=True):
            assert row["form"] == "xla"
            assert row["tflops"] == pytest.approx(1e-9 * count / row["ms"])
            assert row["watts"] == row["rows"] * 4 * 16
            assert 0 < row["error"] < 4e-3
            assert "ratio" not in row
        assert capsys.readouterr().out.count("tokamax: no row") == 3

    @pytest.mark.slow
    def test_errors_are_those_of_the_form(self, monkeypatch: pytest.MonkeyPatch):
        exact = attention.attend

        def spoilt(form: str, *operands: jax.Array) -> jax.Array:
            return exact(form, *operands) * (1 if form == "reference" else jnp.bfloat16(1.5))

        monkeypatch.setattr(attention, "attend", spoilt)
        [row] = attention.measure([8], [(4, 2)], ["xla"])
        assert row["error"] == pytest.approx(0.5, abs=4e-3)

    def test_packed_rows_see_their_segment(self):
        q, k, v, start, end = attention.draw([2, 1, 3], 4, 2)
        assert (q.shape, k.shape, v.shape) == ((6, 4, 16), (6, 2, 16), (6, 2, 16))
        np.testing.assert_array_equal(start, [0, 0, 2, 3, 3, 3])
        np.testing.assert_array_equal(end, [2, 2, 3, 6, 6, 6])

    @pytest.mark.slow
    def test_queries_keep_their_values(self):
        """Outputs fed back would average values until all scores are equal."""
        operands = attention.draw([40], 4, 2)
        outputs = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "sustained", lambda run: outputs.append(run()) or Sustained(1.0, {}))
            attention.time_form("xla", operands, 1.0)
        np.testing.assert_array_equal(outputs[0], jax.jit(lambda *x: attention.attend("xla", *x))(*operands))

    def test_which_forms_take_which_segments(self):
        measured = {
            (form, lengths)
            for form in attention.FORMS
            for lengths in [(4096,), (2048, 2048), (16384,)]
            if attention.can_measure(form, lengths)
        }
        everywhere = {(f, s) for f in ("mosaic_gpu", "tokamax") for s in [(4096,), (2048, 2048), (16384,)]}
        assert measured == everywhere | {
            ("cudnn", (4096,)),
            ("cudnn", (16384,)),
            ("xla", (4096,)),
            ("xla", (2048, 2048)),
        }

    def test_ratio_is_the_time_of_cudnn_over_that_of_the_form_at_the_same_shape(self):
        def row(form: str, rows: int, heads: int, segments: int, ms: float) -> dict[str, Any]:
            shape = {"rows": rows, "heads": heads, "kv_heads": 4, "segments": segments}
            return shape | {"form": form, "ms": ms}

        table = [row("mosaic_gpu", 8, 4, 1, 2.0), row("cudnn", 8, 4, 1, 3.0), row("mosaic_gpu", 8, 4, 5, 1.0)]
        table += [row("cudnn", 8, 28, 1, 6.0), row("xla", 8, 28, 1, 12.0), row("xla", 16, 28, 1, 9.0)]
        ratios = [r.get("ratio") for r in attention.with_ratios(table)]
        assert ratios == [1.5, 1.0, None, 1.0, 0.5, None]

    def test_ours_must_run(self):
        with pytest.raises(NotImplementedError, match="Hopper only"):
            attention.measure([8], [(4, 2)], ["mosaic_gpu"])

    @pytest.mark.slow
    def test_command_line(self, tmp_path: Path):
        attention.main(["--rows", "8", "16", "--heads", "4x2", "--forms", "xla", "--out", str(tmp_path)])
        written = json.loads((tmp_path / "attention_xla.json").read_text())
        assert [(r["rows"], r["heads"], r["kv_heads"]) for r in written["rows"]] == [(8, 4, 2), (16, 4, 2)]


class TestGroupedMatmul:
    @pytest.mark.slow
    def test_without_tokamax_its_rows_are_left_out(self, capsys: pytest.CaptureFixture[str]):
        table = grouped_matmul.measure([40], ["gated", "down"], ["tokamax", "padded"])
        assert [(row["form"], row["implementation"]) for row in table] == [
            ("gated", "padded"),
            ("down", "padded"),
        ]
        assert all(0 < row["error"] < 8e-3 for row in table)
        assert capsys.readouterr().out.count("tokamax: no row") == 2

    @pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
    def test_ours_must_run(self, implementation: str):
        with pytest.raises(NotImplementedError, match=f"{implementation} form .* only"):
            grouped_matmul.measure([40], ["down"], [implementation])


class TestSkinnyMatmul:
    @pytest.fixture(autouse=True)
    def miniature(self, monkeypatch: pytest.MonkeyPatch):
        shapes = {name: small(name) for name in ("llada-8b", "dream-7b")}
        monkeypatch.setattr(skinny_matmul, "SHAPES", shapes)
        monkeypatch.setattr(skinny_matmul, "STACK_BYTES", 1 << 13)
        monkeypatch.setattr(skinny_matmul, "LEAST_SECONDS", 1e-9)

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", ["llada-8b", "dream-7b"])
    def test_products_of_a_layer(self, shape: str):
        table = skinny_matmul.measure(shape, 8, ["xla"])
        assert [row["product"] for row in table] == ["qkv", "o", "gate_up", "down"]
        assert all(0 < row["error"] < 8e-3 for row in table)

    @pytest.mark.parametrize("kind", [None, *KINDS.values()])
    @pytest.mark.parametrize(("rows", "padded"), [(32, 32), (13, 16)])
    @pytest.mark.parametrize("shape", ["llada-8b", "dream-7b"])
    def test_a_sweep_has_the_default_and_cuts_that_a_block_can_take(
        self, shape: str, rows: int, padded: int, kind: type[Quantised] | None
    ):
        options = {"bits": kind.bits, "shifted": kind is Shifted} if kind else {}
        for product in skinny_matmul.products_of(SHAPES[shape]).values():
            first, *others = skinny_matmul.candidates(product, rows, kind)
            options["gated"] = product.gated
            assert first == default_tiles(padded, product.outputs, product.k, **options)
            assert len(others) > 2
            for tiles in others:
                tiles.check(padded, product.outputs, product.k, gated=product.gated)

    @pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
    def test_ours_must_run(self, implementation: str):
        with pytest.raises(NotImplementedError, match=f"{implementation} form .* only"):
            skinny_matmul.measure("llada-8b", 8, [implementation])


class TestQuantisedMatmul:
    @pytest.mark.slow
    @pytest.mark.parametrize("quantization", QUANTIZATIONS)
    def test_products_of_a_layer(self, quantization: WeightForm, monkeypatch: pytest.MonkeyPatch):
        shape = dataclasses.replace(small("llada-8b"), intermediate_size=64)  # uint4 takes groups of 32
        monkeypatch.setattr(quantised_matmul, "SHAPES", {"llada-8b": shape})
        monkeypatch.setattr(skinny_matmul, "STACK_BYTES", 1 << 13)
        monkeypatch.setattr(quantised_matmul, "LEAST_SECONDS", 1e-9)
        table = quantised_matmul.measure("llada-8b", 70, quantization, ["bfloat16", "xla"])
        assert [row["product"] for row in table][::2] == ["qkv", "o", "gate_up", "down"]
        assert {row["quantization"] for row in table} == {None, quantization}
        # Floats of 8 bits have errors of up to a sixteenth, and so many rows are rounded to them too.
        most = 4e-2 if quantization == "fp8" else 8e-3
        assert all(0 < row["error"] < most for row in table)

    @pytest.mark.parametrize("rows", [100, 2048])
    @pytest.mark.parametrize("kind", [Grouped, Shifted])
    def test_a_sweep_has_the_default(self, kind: type[Quantised], rows: int):
        for product in skinny_matmul.products_of(SHAPES["dream-7b"]).values():
            found = quantised_matmul.candidates(product, rows, kind)
            expected = {default_cut(rows, n, product.k, 4, shifted=kind is Shifted) for n in product.outputs}
            assert expected <= set(found)
