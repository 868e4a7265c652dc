"""`jdllm generate`: where prompts come from, and what is printed where."""

import json
from pathlib import Path

import numpy as np
import pytest

from jdllm.llm import LLM
from tests.cli.helpers import IDS, LLADA, SHORT, UseModel, assert_mistake, outputs, process, run


@pytest.mark.slow
def test_json_of_a_recorded_run(trajectories: dict[str, np.ndarray]):
    prompt = trajectories["off_g16_s16_b16.prompt"][0].tolist()
    final = trajectories["off_g16_s16_b16.states"][-1, 0].tolist()
    shape = ["--gen-length", "16", "--steps", "16", "--block-length", "16"]
    result = process(
        *("generate", "--model", str(LLADA), "--token-ids", json.dumps([prompt]), *shape),
        *("--dtype", "float32", "--no-early-stop", "--json"),
    )
    # A machine that is busy takes long to compile, and is said to.
    said = [line for line in result.stderr.splitlines() if not line.startswith("compiling (about")]
    assert (result.returncode, said) == (0, [])
    (output,) = json.loads(result.stdout)["outputs"]
    timings = output.pop("timings")
    assert output == {
        "prompt": None,
        "prompt_token_ids": prompt,
        "seed": 0,
        "token_ids": final[len(prompt) :],
        "text": None,
        "finish_reason": "length",
        "nfe": 16,
    }
    assert set(timings) == {"queued", "running", "total"}
    assert timings["running"] > 0
    assert timings["total"] == pytest.approx(timings["queued"] + timings["running"])


@pytest.mark.slow
def test_sampling_options_reach_the_sampler(
    trajectories: dict[str, np.ndarray], llm: LLM, use_model: UseModel
):
    use_model(llm)
    prompt = trajectories["off_g16_s16_b8_cfg.prompt"][0].tolist()
    final = trajectories["off_g16_s16_b8_cfg.states"][-1, 0].tolist()
    result = run(
        *("--token-ids", json.dumps([prompt]), "--gen-length", "16", "--steps", "16", "--block-length", "8"),
        *("--cfg-scale", "1.5", "--dtype", "float32", "--no-early-stop", "--json"),
    )
    assert outputs(result)[0]["token_ids"] == final[len(prompt) :]


def test_ids_without_a_tokenizer_are_printed_a_prompt_a_line(llm: LLM, use_model: UseModel):
    use_model(llm)
    args = ["--token-ids", "[[5,6,7],[8]]", *SHORT]
    result, structured = run(*args), run(*args, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        o["token_ids"] for o in outputs(structured)
    ]


@pytest.mark.parametrize("source", ["argument", "file", "stdin"])
def test_text_from_every_source(source: str, loaded_speaking: LLM, use_model: UseModel, tmp_path: Path):
    use_model(loaded_speaking)
    file = tmp_path / "prompt.txt"
    file.write_text("w5 w6\nw7\n")
    given, stdin = {
        "argument": (["w5 w6\nw7"], ""),
        "file": (["--file", str(file)], "w9"),
        "stdin": ([], "w5 w6\nw7\r\n"),
    }[source]
    (output,) = outputs(run(*given, *SHORT, "--json", stdin=stdin))
    assert (output["prompt"], output["prompt_token_ids"]) == ("w5 w6\nw7", [5, 6, 7])
    assert output["text"] == "".join(f" w{i}" for i in output["token_ids"])


def test_piped_output_is_the_text_alone(loaded_speaking: LLM, use_model: UseModel):
    use_model(loaded_speaking)
    args = ["w5 w6 w7", *SHORT]
    result = run(*args)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == outputs(run(*args, "--json"))[0]["text"] + "\n"


def test_chat_applies_the_template(loaded_speaking: LLM, use_model: UseModel):
    use_model(loaded_speaking)
    (output,) = outputs(run("w5 w6", "--chat", *SHORT, "--json"))
    assert (output["prompt"], output["prompt_token_ids"]) == ("w1 w5 w6 w2", [1, 5, 6, 2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "rendered"),
    [
        (["--chat-template-kwargs", '{"more": 9}'], [1, 5, 6, 2, 9]),
        (["--continue-final-message"], [1, 5, 6]),
        (["--no-add-generation-prompt"], [1, 5, 6, 2]),
    ],
)
def test_a_conversation_is_rendered_as_options_say(
    options: list[str], rendered: list[int], loaded_speaking: LLM, use_model: UseModel
):
    use_model(loaded_speaking)
    (output,) = outputs(run("w5 w6", "--chat", *options, *SHORT, "--json"))
    assert output["prompt_token_ids"] == rendered
    line = json.dumps({"messages": [{"role": "user", "content": "w5 w6"}]})
    found = run("--jsonl", "-", *options, *SHORT, stdin=line)
    assert json.loads(found.stdout)["prompt_token_ids"] == rendered


def test_a_line_says_how_its_messages_are_rendered(loaded_speaking: LLM, use_model: UseModel):
    use_model(loaded_speaking)
    line = {"messages": [{"role": "user", "content": "w5"}], "chat_template_kwargs": {"more": 8}}
    found = run("--jsonl", "-", "--chat-template-kwargs", '{"more": 9}', *SHORT, stdin=json.dumps(line))
    assert json.loads(found.stdout)["prompt_token_ids"] == [1, 5, 2, 8]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--continue-final-message"], ["--continue-final-message is for conversations: add --chat"]),
        (["--chat", "--chat-template-kwargs", "{"], ["--chat-template-kwargs is not JSON"]),
        (["--chat", "--chat-template-kwargs", "5"], ["chat_template_kwargs is 5"]),
        (["--chat", "--continue-final-message", "--add-generation-prompt"], ["set one of them"]),
    ],
)
def test_mistakes_of_renderings(args: list[str], words: list[str]):
    assert_mistake(run("w5", *args), *words)


def test_several_prompts_are_answered_in_order(loaded_speaking: LLM, use_model: UseModel):
    use_model(loaded_speaking)
    both = outputs(run("w5 w6 w7", "w8", *SHORT, "--json"))
    alone = [outputs(run(text, *SHORT, "--json"))[0] for text in ("w5 w6 w7", "w8")]
    assert [o["prompt"] for o in both] == ["w5 w6 w7", "w8"]
    assert [o["token_ids"] for o in both] == [o["token_ids"] for o in alone]


def test_a_prompt_that_begins_with_a_dash(loaded_speaking: LLM, use_model: UseModel):
    use_model(loaded_speaking)
    (output,) = outputs(run(*SHORT, "--json", "--", "-w5"))
    assert output["prompt"] == "-w5"


@pytest.mark.parametrize(
    "args", [["w5", "--n", "2"], ["w5 w510", "--parse-special", "--prompt-masks", "official"]]
)
def test_what_the_live_display_cannot_show_is_generated_without_it(
    args: list[str], loaded_speaking: LLM, use_model: UseModel, monkeypatch: pytest.MonkeyPatch
):
    use_model(loaded_speaking)
    piped = run(*args, *SHORT)
    monkeypatch.setattr("jdllm.cli.generate.to_terminal", lambda: True)
    shown = run(*args, *SHORT)
    assert (shown.exit_code, shown.stderr, shown.stdout) == (0, "", piped.stdout)


def test_memory_reaches_the_model():
    small = run(*IDS, *SHORT, "--memory", "1KiB")
    assert (small.exit_code, small.stdout) == (3, "")
    assert "KiB" in small.stderr
    assert_mistake(run(*IDS, *SHORT, "--host-memory", "much"), "much")
