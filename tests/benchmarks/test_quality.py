"""The quality table: what a cell asks for, how work and agreement are counted, how parts are merged."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.quality import cells as quality
from benchmarks.quality.cells import (
    Answers,
    Cell,
    draw_instances,
    grid,
    in_order,
    measure,
    rows_forwarded,
)
from benchmarks.quality.tables import changes, comparisons, tables
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo import checkpoint_path
from jdllm.demo.tasks import TASKS, Instance, split_of
from jdllm.demo.tokenizer import EOS
from jdllm.llm import LLM
from jdllm.models.hf_config import config_from_hf
from jdllm.outputs import CompletionOutput, RequestOutput
from jdllm.serving import packing
from jdllm.serving.denoise import cached_packing
from jdllm.serving.request import Request, Timings

ONE_RULE = ["--rules", "threshold"]
SMALL = ["--instances", "8", "--retentions", "0.5", "--delays", "1"]


def row(policy: str, right: str, rule: str = "schedule", **fields: Any) -> dict[str, Any]:
    return {"rule": rule, "policy": policy, "retention": 0.5, "delay": 1, "right": right, **fields}


class TestCells:
    def test_the_whole_grid(self):
        cells = list(grid(list(quality.RULES), quality.ALL_POLICIES, quality.RETENTIONS, quality.DELAYS))
        assert len(set(cells)) == len(cells) == len(quality.RULES) * (5 + 2 * 5 * 2)
        assert cells[:5] == [
            Cell("schedule", "none"),
            Cell("schedule", "prefix", None, 0),
            Cell("schedule", "dual", None, 0),
            Cell("schedule", "selective", None, 1),
            Cell("schedule", "sparse", 0.1, 0),
        ]
        assert Cell("schedule", "prompt") in cells

    def test_the_exact_mode_is_always_there(self):
        cells = list(grid(["factor"], ["sparse"], [0.3], [1]))
        assert cells == [Cell("factor", "none"), Cell("factor", "sparse", 0.3, 1)]

    def test_each_cell_with_each_window(self):
        cells = list(grid(["threshold"], ["dual"], [0.3], [1], [0, 8]))
        assert cells == [
            Cell("threshold", "none"),
            Cell("threshold", "none", window=0),
            Cell("threshold", "none", window=8),
            Cell("threshold", "dual", None, 0),
            Cell("threshold", "dual", None, 0, 0),
            Cell("threshold", "dual", None, 0, 8),
        ]

    def test_sampling_parameters(self):
        common: dict[str, Any] = {"gen_length": 32, "block_length": 8, "early_stop": False}
        common["return_history"] = True
        assert Cell("schedule", "none").sampling(8) == SamplingParams(**common)
        assert Cell("threshold", "head_sparse", 0.3, 0).sampling(8) == SamplingParams(
            **common, transfer="threshold", threshold=0.9, cache="head_sparse", retention=0.3, refresh_delay=0
        )
        assert Cell("falling_0.6", "dual", None, 0, 4).sampling(8) == SamplingParams(
            **common,
            transfer="falling_threshold",
            threshold=0.9,
            threshold_fall=0.6,
            cache="dual",
            refresh_delay=0,
            suffix_window=4,
        )
        assert Cell("factor", "dual", None, 0).sampling(8) == SamplingParams(
            **common, transfer="factor", factor=1.0, cache="dual", refresh_delay=0
        )

    def test_instances_are_held_out_and_as_many_of_each_task(self):
        instances = draw_instances(17)
        assert [sum(i.task == task for i in instances) for task in TASKS] == [3] * len(TASKS)
        assert {split_of(i) for i in instances} == {"test"}
        assert len(set(instances)) == len(instances)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


PROMPT, BLOCKS, BLOCK = 20, 2, 8
LENGTH = PROMPT + BLOCKS * BLOCK


class TestRows:
    @pytest.mark.parametrize(
        ("cache", "options", "expected"),
        [
            slow("none", {}, [LENGTH] * 16),
            slow("dual", {}, ([LENGTH] + [BLOCK] * 7) * 2),
            slow("prefix", {}, [LENGTH] + [2 * BLOCK] * 7 + [LENGTH] + [BLOCK] * 7),
            slow("sparse", {}, ([LENGTH] * 2 + [BLOCK] * 6) * 2),
            slow("head_sparse", {"refresh_delay": 0}, ([LENGTH] + [BLOCK] * 7) * 2),
            slow("dual", {"refresh_interval": 3}, ([LENGTH, *[BLOCK] * 2] * 2 + [LENGTH, BLOCK]) * 2),
            slow("none", {"suffix_window": 3}, [PROMPT + BLOCK + 4] * 8 + [LENGTH] * 8),
            slow("dual", {"suffix_window": 0}, [PROMPT + BLOCK + 1] + [BLOCK] * 7 + [LENGTH] + [BLOCK] * 7),
            slow("prompt", {}, [LENGTH] + [2 * BLOCK] * 15),
            slow("prompt", {"suffix_window": 3}, [PROMPT + BLOCK + 4] + [BLOCK + 4] * 7 + [2 * BLOCK] * 8),
            # At a block's second step all but one of the block and all to its right are masked.
            ("selective", {}, [LENGTH] * 2 + [15] * 6 + [LENGTH] * 2 + [7] * 6),
        ],
    )
    def test_of_the_schedule_by_hand(
        self, llm: LLM, cache: Any, options: dict[str, Any], expected: list[int]
    ):
        sampling = SamplingParams(gen_length=16, block_length=BLOCK, early_stop=False, return_history=True)
        sampling = SamplingParams(**{**vars(sampling), "cache": cache, **options})
        prompt = list(range(5, 5 + PROMPT))
        (output,) = llm.generate(prompt_token_ids=[prompt], sampling=sampling)
        assert output.history is not None
        counted = [rows_forwarded(prompt, output.history[:n], sampling, llm.config) for n in range(17)]
        assert np.diff(counted).tolist() == expected

    @pytest.mark.parametrize("policy", ["none", "selective", "head_sparse", "prompt"])
    def test_are_those_that_the_engine_packs(self, llm: LLM, policy: Any, monkeypatch: pytest.MonkeyPatch):
        """At one step a dispatch, with blocks of many lengths; the tiny Dream would forward one row more."""
        packed: list[int] = []
        pack, pack_reuse = packing.pack, cached_packing.pack_reuse

        def count_whole(requests: Sequence[Request], *others: Any) -> Any:
            packed.append(sum(len(r.tokens) for r in requests))
            return pack(requests, *others)

        def count_reused(requests: Sequence[Request], *others: Any) -> Any:
            packed.append(sum(len(r.forwarded) for r in requests))
            return pack_reuse(requests, *others)

        monkeypatch.setattr("jdllm.serving.denoise.full_runner.pack", count_whole)
        monkeypatch.setattr("jdllm.serving.denoise.cached_packing.pack", count_whole)
        monkeypatch.setattr("jdllm.serving.denoise.cached_runner.pack_reuse", count_reused)
        sampling = SamplingParams(
            gen_length=16,
            block_length=8,
            transfer="threshold",
            threshold=0.2,
            early_stop=False,
            cache=policy,
        )
        sampling = SamplingParams(**{**vars(sampling), "return_history": True})
        prompts = [[5, 6, 7], list(range(10, 34)), [9]]
        outputs = llm.generate(prompt_token_ids=prompts, sampling=sampling, on_step=lambda _: None)
        counted = [
            rows_forwarded(prompt, output.history, sampling, llm.config)
            for prompt, output in zip(prompts, outputs, strict=True)
            if output.history is not None
        ]
        assert sum(counted) == sum(packed)
        assert len({o.nfe for o in outputs}) > 1


class TestAgreement:
    def test_a_row(self):
        instances = [Instance("addition", "1+1=", "2"), Instance("sorting", "sort b=", "b")]
        exact = Answers(np.array([[*b"2", EOS], [*b"b", EOS]]), [True, True], 4, 24, 1.0)
        other = Answers(np.array([[*b"2", EOS], [*b"bb"]]), [True, False], 2, 16, 2.5)
        assert quality.row(Cell("schedule", "dual", None, 0), instances, other, exact) == {
            **{"rule": "schedule", "policy": "dual", "retention": None, "delay": 0, "window": None},
            **{"instances": 2},
            **{"exact_match": 0.5, "tasks": {"addition": 1.0, "sorting": 0.0}},
            **{"tokens_per_forward": 2.0, "tokens_per_row": 0.25},
            **{"same_answers": 0.5, "same_tokens": 0.75, "right": "10", "seconds": 2.5},
        }


class TestComparison:
    def test_of_the_same_instances_and_settings(self):
        right = row("head_sparse", "1" * 40 + "0" * 60), row("sparse", "0" * 40 + "1" + "0" * 59)
        lonely = row("head_sparse", "1" * 100, rule="factor"), row("dual", "1" * 100, rule="factor")
        (found,) = comparisons([*right, *lonely])
        assert (found["head_sparse_only"], found["sparse_only"], found["difference"]) == (40, 1, 0.39)
        assert 0 < found["low"] < 0.39 < found["high"]
        assert found["verdict"] == "better"

    @pytest.mark.parametrize(
        ("head_sparse", "sparse", "verdict"),
        [
            ("0" * 40, "1" * 9 + "0" * 31, "worse"),
            ("1" * 40, "1" * 39 + "0", "no difference shown"),
            ("1" * 40, "1" * 40, "no difference shown"),
        ],
    )
    def test_verdicts(self, head_sparse: str, sparse: str, verdict: str):
        (found,) = comparisons([row("head_sparse", head_sparse), row("sparse", sparse)])
        assert found["verdict"] == verdict


class TestChanges:
    def test_a_window_against_all_masks(self):
        found = changes([row("dual", "11", window=None), row("dual", "01", window=4), row("none", "11")])
        assert [(one["window"], one["against"], one["own_only"], one["other_only"]) for one in found] == [
            (4, "all masks", 0, 1)
        ]

    def test_a_falling_threshold_against_the_fixed_one(self):
        rows = [row("dual", "01", rule="threshold"), row("dual", "11", rule="falling_0.3")]
        (found,) = changes([*rows, row("none", "11", rule="falling_0.6")])
        assert (found["rule"], found["against"]) == ("falling_0.3", "threshold")
        assert (found["own_only"], found["other_only"], found["difference"]) == (1, 0, 0.5)
        assert found["low"] < 0.5 < found["high"]


class TestMerging:
    def test_cells_of_older_records_have_no_window(self):
        old, new = row("dual", "00"), row("dual", "10", window=4)
        assert in_order([new, old]) == [old, new]
        assert in_order([old, row("dual", "11", window=None)]) == [row("dual", "11", window=None)]

    def test_new_cells_replace_their_like_in_the_order_of_the_grid(self):
        old = [row("head_sparse", "00"), row("sparse", "01", rule="factor")]
        new = [row("sparse", "10"), row("head_sparse", "11")]
        assert in_order([*old, *new]) == [new[0], new[1], old[1]]


class Guesser:
    """Stands in for the model: fills a position a step; each cache has other instances wrong."""

    config = config_from_hf(checkpoint_path())

    def __init__(self, instances: Sequence[Instance]) -> None:
        self.answers = {tuple(i.prompt.encode()): i.answer for i in instances}

    def generate(self, *, prompt_token_ids: list[list[int]], sampling: SamplingParams) -> list[RequestOutput]:
        wrong = quality.ALL_POLICIES.index(sampling.cache)
        return [self._answer(ids, index < wrong) for index, ids in enumerate(prompt_token_ids)]

    def _answer(self, prompt: list[int], wrong: bool) -> RequestOutput:
        text = [*self.answers[tuple(prompt)].encode(), *b"?"[: int(wrong)]]
        tokens = np.array([*prompt, *text, *[EOS] * (32 - len(text))], np.int32)
        history = np.full((32, len(tokens)), self.config.mask_id, np.int32)
        for step, state in enumerate(history):
            state[: len(prompt) + step + 1] = tokens[: len(prompt) + step + 1]
        kept = tokens[len(prompt) :].tolist()
        output = CompletionOutput(0, None, kept, "stop", 32, Timings(0, 0), history)
        return RequestOutput(None, prompt, 0, [output])


@pytest.fixture
def guesser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "load_model", lambda _: Guesser(draw_instances(8)))


def recorded(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "quality_demo.json").read_text())


@pytest.mark.usefixtures("guesser")
class TestCommand:
    def test_table_and_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        quality.main([*ONE_RULE, *SMALL, "--out", str(tmp_path)])
        content = recorded(tmp_path)
        assert content["device"] == content["settings"]["device"] == "cpu"
        assert [(r["policy"], r["exact_match"]) for r in content["rows"]] == [
            (policy, 1 - wrong / 8) for wrong, policy in enumerate(quality.ALL_POLICIES)
        ]
        assert [r["same_answers"] for r in content["rows"]] == [r["exact_match"] for r in content["rows"]]
        assert {r["tokens_per_forward"] for r in content["rows"]} == {1.0}
        lengths = [len(i.prompt) + 32 for i in draw_instances(8)]
        for row, rows in ((0, 32 * sum(lengths)), (2, 4 * sum(lengths) + 8 * 28 * 8)):
            assert content["rows"][row]["tokens_per_row"] == pytest.approx(8 * 32 / rows)
        (compared,) = content["comparisons"]
        assert (compared["head_sparse_only"], compared["sparse_only"]) == (0, 1)
        shown, printed = tables(content["rows"]), capsys.readouterr().out
        assert printed == f"{shown}\n"
        lines = shown.splitlines()
        assert sum(line.startswith("| threshold |") for line in lines) == 7 + 7 + 1
        assert {line.count("|") for line in lines[:8]} == {10}
        assert "| threshold | 0.5 | 1 | 0 | 1 | -12.50 |" in shown
        assert "| no difference shown |" in shown

    def test_parts_add_up(self, tmp_path: Path):
        whole = tmp_path / "whole"
        quality.main([*SMALL, "--rules", "threshold", "factor", "--out", str(whole)])
        done: list[str] = []
        for policies in (["sparse", "dual"], ["head_sparse", "prefix", "selective", "prompt"]):
            for rule in ("factor", "threshold"):
                part = tmp_path / f"{len(done)}"
                given = ["--rules", rule, "--policies", *policies, "--out", str(part)]
                quality.main([*SMALL, *given, *(["--append", *done] if len(done) == 3 else [])])
                done.append(str(part / "quality_demo.json"))
        parts = tmp_path / "3"

        def without_times(content: dict[str, Any]) -> list[dict[str, Any]]:
            return [{**row, "seconds": 0} for row in content["rows"]]

        assert without_times(recorded(parts)) == without_times(recorded(whole))
        assert recorded(parts)["comparisons"] == recorded(whole)["comparisons"]
        assert [len(recorded(d)["parts"]) for d in (whole, parts)] == [1, 4]

    def test_what_does_not_add_up(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        given = [*ONE_RULE, *SMALL, "--policies", "none", "--out", str(tmp_path)]
        quality.main(given)
        before, path = recorded(tmp_path), str(tmp_path / "quality_demo.json")
        for more, words in (
            (["--block-length", "16", "--append", path], "'block_length': 16"),
            (["--append", f"{path}.gz"], "is no file"),
        ):
            with pytest.raises(SystemExit) as exit_:
                quality.main([*given, *more])
            assert exit_.value.code == 2
            assert words in capsys.readouterr().err
        assert recorded(tmp_path) == before

    def test_a_part_may_be_written_over(self, tmp_path: Path):
        given = [*ONE_RULE, *SMALL, "--out", str(tmp_path)]
        quality.main([*given, "--policies", "dual"])
        quality.main([*given, "--policies", "prefix", "--append", str(tmp_path / "quality_demo.json")])
        assert [row["policy"] for row in recorded(tmp_path)["rows"]] == ["none", "prefix", "dual"]

    def test_a_run_that_is_cut_short_keeps_its_cells(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        plain = quality.measure

        def fail_at_last(llm: LLM, instances: Sequence[Instance], sampling: SamplingParams) -> Answers:
            if sampling.cache == quality.ALL_POLICIES[-1]:
                raise KeyboardInterrupt
            return plain(llm, instances, sampling)

        monkeypatch.setattr(quality, "measure", fail_at_last)
        with pytest.raises(KeyboardInterrupt):
            quality.main([*ONE_RULE, *SMALL, "--out", str(tmp_path)])
        assert [r["policy"] for r in recorded(tmp_path)["rows"]] == list(quality.ALL_POLICIES[:-1])

    @pytest.mark.parametrize(
        "mistake",
        [["--instances", "0"], ["--retentions", "0"], ["--delays", "-1"], ["--block-length", "5"]],
    )
    def test_mistakes_are_found_before_anything_runs(
        self, mistake: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        with pytest.raises(SystemExit) as exit_:
            quality.main([*ONE_RULE, *mistake, "--out", str(tmp_path)])
        assert exit_.value.code == 2
        assert "error: " in capsys.readouterr().err
        assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_demo_model_answers_with_less_work():
    llm = quality.load_model(4096)
    instances = [i for i in draw_instances(16) if i.task != "retrieval"]
    exact = measure(llm, instances, Cell("schedule", "none").sampling(8))
    cached = measure(llm, instances, Cell("schedule", "dual", None, 0).sampling(8))
    assert np.mean(exact.right) > 0.7
    assert np.mean(cached.right) > 0.5
    assert exact.tokens.shape == cached.tokens.shape == (14, 32)
    assert exact.forwards == cached.forwards == 14 * 32
    assert exact.rows == sum(32 * (len(i.prompt) + 32) for i in instances)
    assert cached.rows == sum(4 * (len(i.prompt) + 32) + 4 * 7 * 8 for i in instances)
