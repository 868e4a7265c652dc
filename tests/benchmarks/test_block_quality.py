"""The quality table of block models: its cells, what is counted, and what is compared with what."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import block_cells as quality
from benchmarks.quality.block_cells import Answers, Cell, comparisons, grid, measure
from benchmarks.quality.block_tables import tables
from benchmarks.quality.cells import draw_instances
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo import checkpoint_path
from jdllm.demo.export import block_hf_config
from jdllm.demo.tasks import Instance
from jdllm.demo.tokenizer import EOS
from jdllm.llm import LLM
from jdllm.models.hf_config import config_from_hf
from jdllm.outputs import CompletionOutput, RequestOutput
from jdllm.serving.request import Timings
from tests.helpers import Golden


def row(rule: str, block_length: int, right: str, threshold: float | None = None) -> dict[str, Any]:
    return {**Cell(rule, block_length, threshold)._asdict(), "right": right}


class TestCells:
    def test_the_grid(self):
        assert grid(8, [4, 8], [0.9], [0.5]) == [
            Cell("schedule", 8),
            Cell("schedule", 1),
            Cell("schedule", 4),
            Cell("sequential", 4),
            Cell("dynamic", 4, 0.9),
            Cell("dynamic", 4, 0.7, 0.5),
            Cell("sequential", 8),
            Cell("dynamic", 8, 0.9),
            Cell("dynamic", 8, 0.7, 0.5),
            Cell("self_speculation", 4),
            Cell("self_speculation", 4, 0.9),
            Cell("self_speculation", 8),
            Cell("self_speculation", 8, 0.9),
        ]

    @pytest.mark.parametrize(
        ("cell", "options"),
        [
            (Cell("schedule", 4), {}),
            (Cell("sequential", 4), {"transfer": "sequential"}),
            (Cell("dynamic", 4, 0.7), {"transfer": "dynamic", "threshold": 0.7}),
            (
                Cell("dynamic", 4, 0.7, 0.5),
                {"transfer": "dynamic", "threshold": 0.7, "editing_threshold": 0.5},
            ),
            (Cell("self_speculation", 4), {"generation_mode": "self_speculation"}),
            (
                Cell("self_speculation", 4, 0.9),
                {"generation_mode": "self_speculation", "transfer": "threshold", "threshold": 0.9},
            ),
        ],
    )
    def test_sampling_parameters(self, cell: Cell, options: dict[str, Any]):
        assert cell.sampling() == SamplingParams(gen_length=32, block_length=4, **options)


class TestComparison:
    def test_with_the_schedule_and_with_blocks_of_one_position(self):
        rows = [
            row("schedule", 8, "1100"),
            row("schedule", 1, "1000"),
            row("dynamic", 4, "1111", 0.9),
            row("self_speculation", 8, "1000"),
        ]
        found = [
            (one["rule"], one["against"], one["own_only"], one["other_only"], one["difference"])
            for one in comparisons(rows, 8)
        ]
        assert found == [
            ("schedule", "schedule, 8", 0, 1, -0.25),
            ("dynamic", "schedule, 8", 2, 0, 0.5),
            ("self_speculation", "schedule, 1", 0, 0, 0.0),
        ]
        assert comparisons(rows[1:], 8)[0]["rule"] == "self_speculation"

    def test_an_interval_and_a_verdict(self):
        (one,) = comparisons([row("schedule", 8, "1" * 100), row("sequential", 8, "0" * 30 + "1" * 70)], 8)
        assert one["low"] < -0.3 < one["high"] < 0
        assert one["verdict"] == "worse"


def test_a_row():
    instances = [Instance("addition", "1+1=", "2"), Instance("sorting", "sort b=", "b")]
    assert quality.row(Cell("dynamic", 8, 0.9), instances, Answers([True, False], 12, 8, 2.5)) == {
        **{"rule": "dynamic", "block_length": 8, "threshold": 0.9, "editing": None},
        **{"instances": 2, "exact_match": 0.5, "tasks": {"addition": 1.0, "sorting": 0.0}},
        **{"tokens_per_forward": 1.5, "right": "10", "seconds": 2.5},
    }


@pytest.mark.slow
def test_cells_of_a_tiny_model_with_random_weights():
    """No answer is right, and no text ends; a block of one position takes one step for each token."""
    with LLM(
        Golden("sdar").directory,
        max_num_batched_tokens=256,
        kv_pool="8MiB",
        progress=False,
        hf_overrides={"eos_token_id": None},
    ) as llm:
        instances = [Instance("addition", prompt, "never") for prompt in ("1+2=", "sort kjh=")]
        one = measure(llm, instances, Cell("schedule", 1).sampling())
        others = [Cell("dynamic", 8, 0.01), Cell("dynamic", 8, 0.7, 0.5), Cell("self_speculation", 8, 0.9)]
        measured = [measure(llm, instances, cell.sampling()) for cell in others]
    assert one[:3] == ([False, False], 64, 64)
    assert [answers[:2] for answers in measured] == [([False, False], 64)] * 3
    # A threshold that everything exceeds fills a block in one step: five blocks of either request.
    assert measured[0].forwards == 2 * 5


class Guesser:
    """Stands in for the model: the dynamic rule has the first instance wrong, and takes half the steps."""

    config = config_from_hf(block_hf_config(32, 1, 2, 40, 1024, block_length=8))

    def __init__(self, instances: Sequence[Instance]) -> None:
        self.answers = {tuple(i.prompt.encode()): i.answer for i in instances}

    def generate(self, *, prompt_token_ids: list[list[int]], sampling: SamplingParams) -> list[RequestOutput]:
        dynamic = sampling.transfer == "dynamic" and sampling.generation_mode is None
        return [self._answer(ids, dynamic, index == 0) for index, ids in enumerate(prompt_token_ids)]

    def _answer(self, prompt: list[int], dynamic: bool, first: bool) -> RequestOutput:
        text = [*self.answers[tuple(prompt)].encode(), *b"?"[: int(dynamic and first)], EOS]
        steps = 4 if dynamic else 8
        return RequestOutput(None, prompt, 0, [CompletionOutput(0, None, text, "stop", steps, Timings(0, 0))])


class TestCommand:
    def test_table_and_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(quality, "load_model", lambda _: Guesser(draw_instances(8)))
        given = ["--model", "blocks", "--instances", "8", "--block-lengths", "8", "--thresholds", "0.9"]
        quality.main([*given, "--editing", "0.5", "--out", str(tmp_path)])
        content = json.loads((tmp_path / "block_quality_demo.json").read_text())
        cells = [(r["rule"], r["block_length"], r["threshold"], r["editing"]) for r in content["rows"]]
        assert cells == [tuple(cell) for cell in grid(8, [8], [0.9], [0.5])]
        assert [r["exact_match"] for r in content["rows"]] == [1, 1, 1, 0.875, 0.875, 1, 1]
        tokens = sum(len(i.answer) + 1 for i in draw_instances(8))
        assert content["rows"][0]["tokens_per_forward"] == tokens / 64
        assert content["rows"][3]["tokens_per_forward"] == (tokens + 1) / 32
        assert content["settings"]["model"] == "blocks"
        shown, printed = tables(content["rows"], content["comparisons"]), capsys.readouterr().out
        assert printed == f"{shown}\n"
        assert "| dynamic | 8 | 0.9 |  | schedule, 8 | 0 | 1 | -12.50 |" in shown
        assert "| dynamic | 8 | 0.9 |  | 87.5% |" in shown

    @pytest.mark.parametrize(
        ("mistake", "words"),
        [
            (["--block-lengths", "5"], "block_length"),
            (["--editing", "2"], "editing_threshold"),
            (["--instances", "0"], "instances is 0"),
            (["--model", str(checkpoint_path())], "is no block model"),
        ],
    )
    def test_mistakes_are_found_before_anything_runs(
        self,
        mistake: list[str],
        words: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ):
        if "--model" not in mistake:
            monkeypatch.setattr(quality, "load_model", lambda _: Guesser([]))
        with pytest.raises(SystemExit) as exit_:
            quality.main(["--model", "blocks", "--instances", "8", *mistake, "--out", str(tmp_path)])
        assert exit_.value.code == 2
        assert words in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
