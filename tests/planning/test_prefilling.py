"""Plans of long contexts agree with what the engine evaluates and stores."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.shapes import SHAPES
from jdllm.decoding.prefilling import PRESETS, Prefilling
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.pallas.device import HOPPER
from jdllm.planning.account import make_account
from jdllm.planning.budget import Budget
from jdllm.planning.plan import Workload
from jdllm.planning.prefilling import Question, StagePlan, context_rows, plan_stages
from jdllm.serving.long.request import LongContext, LongSpec, long_spec
from tests.planning.plan_command import invoke, run

CONFIG = SHAPES["dream-7b"]
ROWS = 8192


def stages(prefilling: Prefilling, question: Question, rows: int = ROWS) -> dict[str, StagePlan]:
    workload = Workload(CONFIG, "bfloat16")
    account = make_account(CONFIG, "bfloat16", Budget(24 << 30), device=HOPPER, max_num_batched_tokens=rows)
    return {stage.name: stage for stage in plan_stages(workload, account, "h200", prefilling, question)}


def spec_of(prefilling: Prefilling, question: Question) -> LongSpec:
    sampling = SamplingParams(
        gen_length=question.gen_length, block_length=question.block_length, prefilling=prefilling
    )
    ids = np.arange(2, 130_000, dtype=np.int32)
    query = ids[: question.query]
    long = LongContext(ids[: question.instruction], ids[: question.context], query, query)
    return long_spec(long, sampling, CONFIG, 1)


@pytest.mark.parametrize("preset", ["dream", "dream_sparse", "ultrallada", "official"])
@pytest.mark.parametrize("context", [700, 8192, 20_000])
@pytest.mark.parametrize("chunk_bos", [True, False])
def test_rows_and_pages_are_those_of_a_request(preset: str, context: int, chunk_bos: bool):
    prefilling = PRESETS[preset].changed(chunk_bos=chunk_bos)  # pyright: ignore[reportArgumentType]
    question = Question(context)
    found, spec = stages(prefilling, question), spec_of(prefilling, question)
    assert -(-spec.stored_rows // PAGE_ROWS) == found["build"].stored_rows // PAGE_ROWS
    lengths = [len(chunk.tokens) for chunk in spec.chunks]
    assert context_rows(prefilling, question) // PAGE_ROWS <= len(lengths) * -(-max(lengths) // PAGE_ROWS) + 1
    scored = sum(lengths) + len(lengths) * (question.instruction + question.query + prefilling.drafted)
    assert found["score"].rows <= ROWS
    assert scored <= found["score"].rows * found["score"].evaluations
    assert ("retain" in found) == (preset == "dream_sparse")
    assert ("draft" in found) == (prefilling.score == "draft")


def test_time_grows_with_the_context_and_the_answer_does_not():
    short, long = (stages(PRESETS["dream"], Question(context)) for context in (8192, 131_072))
    assert long["score"].seconds == pytest.approx(16 * short["score"].seconds, rel=0.01)
    assert long["answer"] == short["answer"]
    assert long["build"] == short["build"]


def test_larger_batches_hold_more():
    small, large = (stages(PRESETS["dream"], Question(131_072), rows) for rows in (2048, 8192))
    assert small["score"].evaluations > large["score"].evaluations
    assert small["score"].step_bytes < large["score"].step_bytes


def test_the_command(configs: dict[str, Path], no_card: None):
    model = configs["dream"]
    shown = run(model, "--prefilling", "dream", "--json", context=20_000)
    assert shown.exit_code == 0, shown.output
    facts = json.loads(shown.stdout)
    assert [stage["name"] for stage in facts["stages"]] == ["draft", "score", "build", "answer"]
    assert facts["peak_bytes"] < 24 << 30
    told = run(model, "--prefilling", '{"tokens_kept": 256}', context=1_000_000)
    assert told.exit_code == 0, told.output
    assert "retain" in told.stdout
    assert "do not fit: each question encodes them again" in told.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prefilling", "drem", "--context", "5000"], "one of 'dream'"),
        (["--prefilling", "dream"], "give its tokens"),
        (["--prefilling", "none", "--context", "5000"], "expected a preset"),
    ],
)
def test_mistakes(configs: dict[str, Path], no_card: None, options: list[str], words: str):
    result = invoke(configs["dream"], "--target", "h200", "--memory", "24GiB", *options)
    assert result.exit_code == 2
    assert words in result.output
