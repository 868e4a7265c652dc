"""`jdllm infill` and `jdllm score`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from jdllm.cli import app
from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from tests.causal_texts import write_speaking
from tests.cli.helpers import UseModel, assert_mistake, outputs

MASKED = "w5 w510 w6 w510 w510"  # 510 is the mask id of the tiny checkpoint


def run(*args: str) -> Result:
    return CliRunner().invoke(app, [*args])


def test_infill_fills_masks_alone(loaded_speaking: LLM, use_model: UseModel):
    use_model(loaded_speaking)
    (output,) = outputs(run("infill", MASKED, "--block-length", "1", "--json"))
    filled = output["token_ids"]
    assert (filled[0], filled[2], len(filled)) == (5, 6, 5)
    assert 510 not in filled
    (expected,) = loaded_speaking.infill(MASKED, SamplingParams(block_length=1))
    assert (filled, output["nfe"]) == (expected.token_ids, 3)
    assert run("infill", MASKED, "--block-length", "1").stdout == f"{expected.text}\n"


def test_infill_of_ids(llm: LLM, use_model: UseModel):
    use_model(llm)
    result = run("infill", "--token-ids", "[[5,510,6],[510,7]]", "--seed", "1")
    assert (result.exit_code, result.stderr) == (0, "")
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first[0], first[2], second[1]) == (5, 6, 7)


def test_mistakes_in_an_infilling(loaded_speaking: LLM, use_model: UseModel):
    use_model(loaded_speaking)
    assert_mistake(run("infill", "w5 w6"), "nothing to infill")
    assert_mistake(run("infill", MASKED, "--gen-length", "8"), "--gen-length")
    assert_mistake(run("infill"), "empty")


def test_infill_of_a_block_model(tmp_path: Path, use_model: UseModel):
    with LLM(write_speaking(tmp_path, "sdar", "none"), dtype="float32") as llm:
        use_model(llm)
        (output,) = outputs(run("infill", "w5 w317 w6 w7 w8 w9", "--json"))
        (expected,) = llm.infill(token_ids=[[5, 317, 6, 7, 8, 9]])
        assert output["token_ids"] == expected.token_ids
        assert output["token_ids"][2:] == [6, 7, 8, 9]


def test_score_is_that_of_the_library(loaded_speaking: LLM, use_model: UseModel):
    use_model(loaded_speaking)
    args = ["score", "w5 w6", "w7 w8", "--mc-num", "4", "--batch-size", "2", "--seed", "1"]
    expected = loaded_speaking.score("w5 w6", "w7 w8", mc_num=4, batch_size=2, seed=1)
    plain, structured = run(*args), run(*args, "--json")
    assert float(plain.stdout) == pytest.approx(expected, rel=1e-5)
    assert json.loads(structured.stdout) == {"log_likelihood": expected}
    assert (plain.exit_code, plain.stderr, structured.stderr) == (0, "", "")


def test_score_of_a_causal_model_is_exact(tmp_path: Path, use_model: UseModel):
    with LLM(write_speaking(tmp_path, "mistral_swa", "known"), dtype="float32") as llm:
        use_model(llm)
        plain = run("score", "w5 w6", "w7 w8")
        assert float(plain.stdout) == pytest.approx(llm.score([5, 6], [7, 8]), rel=1e-5)
        assert_mistake(run("score", "w5", "w6", "--mc-num", "4"), "--mc-num is for models that denoise")
        assert_mistake(run("score", "", "w6"), "the prompt is empty", "such as the bos id 1")


def test_score_of_a_block_model_at_block_length_1_is_exact(tmp_path: Path, use_model: UseModel):
    with LLM(write_speaking(tmp_path, "sdar", "none"), dtype="float32") as llm:
        use_model(llm)
        args = ["score", "w5 w6", "w7 w8 w9", "--block-length", "1"]
        few, many = (float(run(*args, "--mc-num", str(count)).stdout) for count in (1, 64))
        assert few == pytest.approx(llm.score([5, 6], [7, 8, 9], block_length=1), rel=1e-5)
        assert many == few
        assert_mistake(run("score", "w5", "w6", "--block-length", "3"), "--block-length is 3")
        assert_mistake(run("score", "w5", "w6", "--cfg-scale", "1"), "--cfg-scale is for models that see")


def test_mistakes_in_a_score(loaded_speaking: LLM, use_model: UseModel):
    use_model(loaded_speaking)
    assert_mistake(run("score", "w5", ""), "answer is empty")
    assert_mistake(run("score", "w5", "w6", "--mc-num", "0"), "--mc-num")
    assert_mistake(run("score", "w5", "w6", "--block-length", "4"), "--block-length is for block models")
    assert_mistake(run("score", "w5", "w6", "--cfg-scale", "-1"), "--cfg-scale is -1")
