"""Checkpoints on real text: which windows are read, perplexities against recorded logits, and intervals."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

from benchmarks.quality.paired import mean_interval
from benchmarks.quality.real_text import Scores, bound_scores, compared, exact_scores, main
from benchmarks.quality.text_tables import table
from benchmarks.quality.texts import Windows, described, read_texts, shared_out, windows_of
from benchmarks.tables import record_parts
from jdllm.decoding.likelihood import perturb
from jdllm.demo import checkpoint_path
from jdllm.demo.tokenizer import plain_ids
from jdllm.errors import RequestError
from jdllm.llm import LLM
from tests.causal_texts import BOS, words, write_speaking
from tests.conftest import BUDGET, KV_POOL
from tests.helpers import Golden

CONTEXT = 36


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A directory with code, English, and files that are no text."""
    directory = tmp_path / "library"
    (directory / "deep").mkdir(parents=True)
    (directory / "b.py").write_text("b" * 50)
    (directory / "a.py").write_text("a" * 25)
    (directory / "deep" / "c.md").write_text("c" * 95)
    (directory / "deep" / "latin.txt").write_bytes(b"caf\xe9")
    (directory / "empty.rst").write_text("")
    (directory / "data.json").write_text("{}")
    return directory


def speaking(directory: Path, family: str, begins: str = "none") -> LLM:
    directory.mkdir()
    path = write_speaking(directory, family, begins)  # pyright: ignore[reportArgumentType]
    return LLM(path, dtype="float32", max_num_batched_tokens=BUDGET, kv_pool=KV_POOL, progress=False)


def recorded() -> tuple[Windows, np.ndarray]:
    """Two windows, and the f64 log-probabilities of the token after each of their tokens by transformers."""
    tensors = Golden("llama").tensors()
    logits = tensors["fwd_batch.logits"].astype(np.float64)
    return Windows(tensors["fwd_batch.input_ids"], [".py", ".txt"]), log_softmax(logits, axis=-1)


def made(nll: list[float], ids: np.ndarray | None = None, best: np.ndarray | None = None) -> Scores:
    given = np.zeros((len(nll), 3), np.int32) if ids is None else ids
    kind = "bound" if best is None else "exact"
    return Scores(kind, Windows(given, [".py"] * len(nll)), np.array(nll), best, 1.0)


class TestWindows:
    def test_a_directory_is_read_by_suffix_and_in_order(self, library: Path):
        texts = read_texts([library], 1000)
        assert texts == {".md": ["c" * 95], ".py": ["a" * 25, "b" * 50]}
        assert read_texts([library / "data.json", library], 1000) == {".json": ["{}"], **texts}
        [english, code] = described(texts)
        assert (english["suffix"], english["files"], english["bytes"]) == (".md", 1, 95)
        assert (code["suffix"], code["files"], code["bytes"]) == (".py", 2, 75)
        # sha256sum of the two files, one after the other
        assert code["sha256"] == "d8a39f4524f509671716412dbc3abadefb05481725fc789fb5ea14e57b587ff4"

    def test_of_much_text_files_are_left_out_evenly(self, tmp_path: Path):
        for i in range(10):
            (tmp_path / f"{i}.py").write_text(str(i) * (1 << 18))
        (tmp_path / "few.md").write_text("few")
        texts = read_texts([tmp_path], 1000)
        assert [text[0] for text in texts[".py"]] == ["0", "3", "6", "9"]
        assert texts[".md"] == ["few"]
        assert len(read_texts([tmp_path], 100_000)[".py"]) == 10

    def test_windows_are_whole_disjoint_and_from_all_places(self):
        text = "".join(map(chr, range(32, 127)))
        texts = {".md": [text], ".py": [text[:20], text[20:60]]}
        for count, shares in ((2, (1, 1)), (8, (4, 4)), (11, (6, 5)), (100, (9, 6))):
            windows = windows_of(texts, plain_ids, 10, count)
            kinds = tuple(windows.suffixes.count(suffix) for suffix in (".md", ".py"))
            assert kinds == shares
            for suffix, whole in ((".md", text), (".py", text[:60])):
                pieces = ["".join(map(chr, ids)) for ids, own in zip(*windows, strict=True) if own == suffix]
                starts = [whole.index(piece) for piece in pieces]
                assert all(start % 10 == 0 for start in starts)
                gaps = np.diff([*starts, len(whole) // 10 * 10])
                assert gaps.min() >= 10
                assert gaps.max() - gaps.min() <= 10
            again = windows_of(texts, plain_ids, 10, count)
            np.testing.assert_array_equal(again.ids, windows.ids)

    def test_what_one_has_not_the_others_give(self):
        assert shared_out(10, {"a": 100, "b": 100}) == {"a": 5, "b": 5}
        assert shared_out(10, {"a": 100, "b": 2, "c": 4}) == {"a": 4, "b": 2, "c": 4}
        assert shared_out(10, {"a": 1, "b": 0}) == {"a": 1, "b": 0}

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (["none"], "none is no file and no directory"),
            (["deep/latin.txt"], "latin.txt is no UTF-8: .* at byte 3"),
            (["empty.rst"], r"no text in empty.rst: give files, or directories with .md, .py, .rst or .txt"),
        ],
    )
    def test_what_is_no_text_is_refused(self, names: list[str], message: str, library: Path):
        with pytest.raises(RequestError, match=message):
            read_texts([library / name for name in names], 1000)

    def test_text_that_is_shorter_than_a_window_is_refused(self):
        with pytest.raises(RequestError, match="no 40 tokens in files of one suffix"):
            windows_of({".md": ["a" * 39], ".py": ["a" * 39]}, plain_ids, 40, 1)


class TestExact:
    @pytest.fixture
    def llm(self, tmp_path: Path) -> Iterator[LLM]:
        with speaking(tmp_path / "llama", "llama") as llm:
            yield llm

    def test_perplexities_are_those_of_transformers(self, llm: LLM):
        windows, following = recorded()
        scores = exact_scores(llm, windows, [])
        rows = following[:, :-1]
        chosen = np.take_along_axis(rows, windows.ids[:, 1:, None], axis=-1)[..., 0]
        assert scores.nll == pytest.approx(-chosen.mean(axis=1), abs=2e-5)
        assert scores.perplexity() == pytest.approx(math.exp(-chosen.mean()), rel=2e-5)
        assert scores.perplexity(".txt") == pytest.approx(math.exp(-chosen[1].mean()), rel=2e-5)
        assert scores.best is not None
        assert np.take_along_axis(rows, scores.best[..., None], axis=-1)[..., 0] == pytest.approx(
            rows.max(axis=-1), abs=2e-4
        )
        size = sum(len(f" w{i}") for i in windows.ids[:, 1:].ravel())
        assert llm.tokenizer is not None
        assert scores.bits_per_byte(llm.tokenizer) == pytest.approx(
            -chosen.sum() / math.log(2) / size, rel=2e-5
        )

    def test_what_begins_a_text_is_before_each_window(self, llm: LLM):
        windows, _ = recorded()
        behind = log_softmax(llm.logits([[BOS, *ids] for ids in windows.ids]).astype(np.float64), axis=-1)
        chosen = np.take_along_axis(behind[:, 1:-1], windows.ids[:, 1:, None], axis=-1)[..., 0]
        assert exact_scores(llm, windows, [BOS]).nll == pytest.approx(-chosen.mean(axis=1), abs=2e-5)


def test_bounds_are_those_of_the_masks(tmp_path: Path):
    """Against the published formula over the logits of masked windows."""
    ids = np.random.default_rng(0).integers(2, 400, (2, 12)).astype(np.int32)
    windows = Windows(ids, [".py"] * 2)
    with speaking(tmp_path / "llada", "llada") as llm:
        scores = bound_scores(llm, windows, [], 4, 7)
        expected = []
        for i, window in enumerate(ids):
            masked, ratio = perturb(11, 4, 4, 7 + i)
            masked = np.pad(masked[0], ((0, 0), (1, 0)))
            logits = llm.logits(np.where(masked, llm.config.mask_id, window))
            rows = log_softmax(logits.astype(np.float64), axis=-1)
            chosen = np.take_along_axis(rows, np.broadcast_to(window, masked.shape)[..., None], axis=-1)
            expected.append(-((chosen[..., 0] * masked).sum(axis=1) / ratio[0]).mean() / 11)
        again = bound_scores(llm, windows, [], 4, 7)
    assert scores.nll == pytest.approx(expected, rel=1e-5)
    assert (scores.kind, scores.best) == ("bound", None)
    assert compared(scores, again) == {"ratio": 1.0, "low": 1.0, "high": 1.0}


class TestCompared:
    def test_an_interval_of_a_mean_by_hand(self):
        # The standard deviation of 1, 2 and 3 is 1; 4.302653 is the quantile of Student's t with 2 degrees.
        low, high = mean_interval(np.array([1.0, 2.0, 3.0])) or (0, 0)
        assert (low, high) == pytest.approx((2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)))
        assert mean_interval(np.array([1.0])) is None

    def test_an_interval_covers_the_mean_as_often_as_it_says(self):
        draws = np.random.default_rng(0).normal(0.3, 2.0, (4000, 5))
        found = [mean_interval(draw) for draw in draws]
        covered = np.mean([each is not None and each.low <= 0.3 <= each.high for each in found])
        assert 0.94 < covered < 0.96

    def test_a_ratio_is_of_perplexities(self):
        best = np.array([[5, 6], [7, 8], [9, 9]])
        first, other = made([1.0, 2.0, 3.0], best=best), made([1.1, 2.2, 3.3], best=best + np.array([0, 1]))
        result = compared(first, other)
        assert result["ratio"] == pytest.approx(other.perplexity() / first.perplexity())
        reach = 4.302653 * 0.1 / math.sqrt(3)
        assert result["low"] == pytest.approx(math.exp(0.2 - reach))
        assert result["high"] == pytest.approx(math.exp(0.2 + reach))
        assert result["same_argmax"] == 0.5
        assert compared(made([1.0]), made([2.0])) == {"ratio": pytest.approx(math.e)}

    def test_other_text_and_other_measures_are_not_compared(self):
        with pytest.raises(RequestError, match="tokenizers differ"):
            compared(made([1.0]), made([1.0], ids=np.ones((1, 3), np.int32)))
        with pytest.raises(RequestError, match="one is bound, that of the other exact"):
            compared(made([1.0]), made([1.0], best=np.zeros((1, 2), np.int32)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "1"], "error: context is 1, expected at least 2"),
        (["--tokens", "0"], "error: tokens is 0, expected a positive integer"),
        (["--mc-num", "0"], "error: mc_num is 0, expected a positive integer"),
        (["--context", "2048"], "error: context is 2048, longer than the 1024 positions of checkpoint"),
        (["--model", "nowhere"], "error: no directory nowhere"),
        (["--model", str(Golden("llama").directory)], f"error: {Golden('llama').directory} has no tokenizer"),
    ],
)
def test_a_mistake_is_one_line(
    options: list[str], message: str, library: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["--model", str(checkpoint_path()), "--text", str(library), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


@pytest.mark.slow
def test_checkpoints_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    windows, following = recorded()
    text = tmp_path / "text.txt"
    text.write_text(words(*windows.ids.ravel().tolist()))
    for name, family in (("first", "llama"), ("masks", "llada")):
        speaking(tmp_path / name, family).close()
    models = [str(tmp_path / name) for name in ("first", "masks")]
    options = f"--quantization int8 --context {CONTEXT} --dtype float32 --mc-num 2 --out {tmp_path}".split()
    assert main(["--model", *models, "--text", str(text), *options]) == 0
    written = (tmp_path / "real_text_first.json").read_text()
    assert str(tmp_path) not in written
    record = json.loads(written)
    first, rounded, masks, _ = record["rows"]
    chosen = np.take_along_axis(following[:, :-1], windows.ids[:, 1:, None], axis=-1)
    assert first["perplexity"] == pytest.approx(math.exp(-chosen.mean()), rel=2e-5)
    assert (first["windows"], first["tokens"]) == (2, 70)
    assert rounded["weights_bytes"] < 0.8 * first["weights_bytes"]
    assert rounded["ratio"] == pytest.approx(rounded["perplexity"] / first["perplexity"], rel=1e-9)
    assert 0 < abs(rounded["ratio"] - 1) < 0.05
    assert rounded["same_argmax"] > 0.7
    assert masks["kind"] == "bound"
    rates = ("scored_tokens_s", "tokens_s_1", "tokens_s_8")
    assert all(row[rate] > 0 for row in record["rows"] for rate in rates)
    note, other = record["notes"]
    assert note == "masks is not compared with first: the perplexity of one is exact, that of the other bound"
    assert capsys.readouterr().out == f"{table(record['rows'])}\n{note}\n{other}\n"
    assert list(record_parts("real_text_first", record))[-1] == table(record["rows"])
