"""Mistakes are one line and exit code 2."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jdllm.cli import app
from tests.cli.helpers import IDS, LLADA, Checkpoint, assert_mistake, process, run


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["prompt is empty", "--file"]),
        ([""], ["prompt is empty"]),
        (["w5", *IDS], ["an argument and --token-ids"]),
        (["w5", "--file", "prompt.txt"], ["an argument and --file"]),
        (["--file", "absent.txt"], ["absent.txt", "No such file"]),
        (["w\udcff"], ["UTF-8"]),
        (["w5"], ["text prompt needs tokenizer files"]),
        (["w5", "--chat"], ["chat template needs tokenizer files"]),
        ([*IDS, "--chat"], ["--chat", "--token-ids"]),
        (["--token-ids", "[[5,"], ["not JSON", "[[5,6,7]]"]),
        (["--token-ids", "[" * 100_000], ["not JSON"]),
        (["--token-ids", "[5,6]"], ["one list of ids for each prompt"]),
        (["--token-ids", "[]"], ["one list of ids for each prompt"]),
        (["--token-ids", "[[5,true]]"], ["holds true"]),
        (["--token-ids", "[[5,1.5]]"], ["holds 1.5"]),
        (["--token-ids", "[[5,512]]"], ["token id 512", "position 1"]),
        (["--token-ids", "[[5,-1]]"], ["token id -1"]),
        (["--token-ids", "[[5,510]]"], ["mask id 510", "position 1"]),
        (
            [*IDS, "--gen-length", "16", "--block-length", "5"],
            ["16 is not divisible by --block-length 5"],
        ),
        ([*IDS, "--gen-length", "16", "--block-length", "4", "--steps", "6"], ["--steps 6 is not divisible"]),
        ([*IDS, "--gen-length", "0"], ["--gen-length is 0"]),
        ([*IDS, "--temperature", "-0.5"], ["--temperature is -0.5"]),
        ([*IDS, "--cfg-scale", "nan"], ["--cfg-scale is nan"]),
        ([*IDS, "--remasking", "lowest"], ["--remasking is 'lowest'", "'low_confidence', 'random'"]),
        ([*IDS, "--prompt-masks", "fill"], ["--prompt-masks is 'fill'"]),
        ([*IDS, "--confidence-eos-eot-inf", "yes"], ["--confidence-eos-eot-inf is 'yes'"]),
        ([*IDS, "--confidence-dtype", "int8"], ["--confidence-dtype is 'int8'"]),
        ([*IDS, "--seed", "-2"], ["--seed is -2"]),
        ([*IDS, "--transfer", "fastest"], ["--transfer is 'fastest'", "'entropy_bound'"]),
        ([*IDS, "--alg", "fastest"], ["--alg is 'fastest'", "'maskgit_plus'"]),
        ([*IDS, "--alg", "entropy", "--transfer", "factor"], ["--alg 'entropy' brings its own order"]),
        ([*IDS, "--alg", "entropy", "--block-length", "8"], ["--alg 'entropy' has blocks only with a cache"]),
        ([*IDS, "--threshold", "0.5"], ["--threshold has no effect here"]),
        ([*IDS, "--alg", "confidence_threshold", "--steps", "100"], ["128 is not divisible by 100"]),
        ([*IDS, "--top-p", "1.5", "--alg", "entropy"], ["--top-p is 1.5", "from 0 to 1"]),
        ([*IDS, "--threshold", "2e6"], ["--threshold is 2000000.0"]),
        ([*IDS, "--undefined-tokens", "all"], ["--undefined-tokens is 'all'"]),
        ([*IDS, "--cache", "window"], ["--cache is 'window'", "'head_sparse'"]),
        ([*IDS, "--cache", "dual", "--cfg-scale", "1"], ["--cache 'dual'", "set --cfg-scale 0"]),
        ([*IDS, "--retention", "0"], ["--retention is 0", "above 0"]),
        ([*IDS, "--pool-kernel", "2"], ["--pool-kernel is 2", "odd"]),
        ([*IDS, "--refresh-delay", "-1"], ["--refresh-delay is -1"]),
        ([*IDS, "--refresh-interval", "-1"], ["--refresh-interval is -1"]),
        ([*IDS, "--dtype", "int8"], ["dtype is 'int8'"]),
        ([*IDS, "--gen-length", "many"], ["--gen-length is 'many', expected"]),
        ([*IDS, "--no-such-option"], ["--no-such-option"]),
        (["-5+3="], ["No such option: -5", "put -- before"]),
    ],
)
def test_mistakes_in_the_request(args: list[str], words: list[str]):
    assert_mistake(run(*args), *words)


def test_a_model_that_does_not_fit_ends_with_3():
    for command in ("generate", "serve"):
        words = IDS if command == "generate" else ["--port", "0"]
        model = ["--model", str(LLADA)] if command == "generate" else [str(LLADA)]
        memory = ["--memory", "100KiB", "--host-memory", "0"]
        result = CliRunner().invoke(app, [command, *model, *words, *memory])
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (3, "", 1)
        assert result.stderr.startswith("error: with --memory 100.00 KiB a step needs at least")


def test_mistakes_in_the_input_streams(tmp_path: Path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert_mistake(run("--file", str(tmp_path / "latin")), "latin", "UTF-8", "byte 3")
    assert_mistake(run(stdin=b"\xff"), "standard input", "UTF-8")
    assert_mistake(run("--file", str(tmp_path)), str(tmp_path), "directory")


def test_mistakes_in_the_model(tmp_path: Path, checkpoint: Checkpoint):
    assert_mistake(run(*IDS, model=tmp_path / "absent"), str(tmp_path / "absent"))
    directory = checkpoint()
    with (directory / "model.safetensors").open("r+b") as weights:
        weights.truncate(100_000)
    assert_mistake(run(*IDS, model=directory), str(directory / "model.safetensors"))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
            ["family", "GPT2LMHeadModel", "LLaDAModelLM"],
        ),
        ({"mlp_hidden_size": 96}, ["of another shape", "[96, 64]"]),
        ({"mask_token_id": None}, ["mask_token_id"]),
    ],
)
def test_mistakes_in_the_configuration(keys: dict[str, Any], words: list[str], checkpoint: Checkpoint):
    assert_mistake(run(*IDS, model=checkpoint(**keys)), *words)


def test_mistakes_in_the_command():
    runner = CliRunner()
    assert_mistake(runner.invoke(app, []), "command")
    assert_mistake(runner.invoke(app, ["infill", "-w5"]), "No such option: -w", "put --")
    assert_mistake(runner.invoke(app, ["score", "w5"]), "answer")
    assert_mistake(runner.invoke(app, ["generat"]), "generat")


@pytest.mark.slow
def test_a_mistake_in_a_true_process():
    assert_mistake(process("generate", "--model", str(LLADA), "w5"), "tokenizer.json")
