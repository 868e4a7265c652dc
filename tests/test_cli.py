"""The command line: what it prints where, its exit codes and its display in a terminal."""

import dataclasses
import inspect
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner, Result

from jdllm.cli import app
from jdllm.cli.evaluate import evaluate, generator
from jdllm.cli.generate import generate
from jdllm.cli.live import LiveResponse
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo.tokenizer import EOS
from jdllm.llm import LLM
from jdllm.outputs import RequestOutput
from jdllm.serving.engine import StepUpdate
from jdllm.serving.request import Timings

LLADA = Path(__file__).parent / "goldens" / "llada"
IDS = ["--token-ids", "[[5,6,7]]"]
SHORT = ["--gen-length", "8", "--dtype", "float32", "--no-early-stop"]

Checkpoint = Callable[..., Path]
UseModel = Callable[[Any], None]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Copies the tiny checkpoint, with some keys of its `config.json` replaced."""

    def make(**keys: Any) -> Path:
        directory = tmp_path / "checkpoint"
        directory.mkdir()
        shutil.copy(LLADA / "model.safetensors", directory)
        config = json.loads((LLADA / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | keys))
        return directory

    return make


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with a tokenizer in which id 5 is the word `w5`."""
    directory = tmp_path_factory.mktemp("speaking")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(LLADA / name, directory)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}w1 {{ m['content'] }} w2{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def loaded_speaking(speaking: Path) -> LLM:
    return LLM(speaking, dtype="float32")


@pytest.fixture
def use_model(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Has the commands use a model that is already loaded and compiled."""

    def use(llm: Any) -> None:
        for command in ("generate", "evaluate"):
            monkeypatch.setattr(f"jdllm.cli.{command}.load_model", lambda *_: llm)

    return use


def run(*args: str, model: Path | None = LLADA, stdin: str | bytes = "") -> Result:
    where = [] if model is None else ["--model", str(model)]
    return CliRunner().invoke(app, ["generate", *where, *args], input=stdin)


def outputs(result: Result) -> list[dict[str, Any]]:
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)["outputs"]


def process(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    defaults: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    return subprocess.run([sys.executable, "-m", "jdllm", *args], timeout=120, **(defaults | options))


def assert_mistake(result: Result | subprocess.CompletedProcess[str], *words: str) -> None:
    code = result.exit_code if isinstance(result, Result) else result.returncode
    assert (code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.endswith("\n")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_json_of_a_recorded_run(trajectories: dict[str, np.ndarray]):
    prompt = trajectories["off_g16_s16_b16.prompt"][0].tolist()
    final = trajectories["off_g16_s16_b16.states"][-1, 0].tolist()
    shape = ["--gen-length", "16", "--steps", "16", "--block-length", "16"]
    result = process(
        *("generate", "--model", str(LLADA), "--token-ids", json.dumps([prompt]), *shape),
        *("--dtype", "float32", "--no-early-stop", "--json"),
    )
    assert (result.returncode, result.stderr) == (0, "")
    (output,) = json.loads(result.stdout)["outputs"]
    timings = output.pop("timings")
    assert output == {
        "prompt": None,
        "prompt_token_ids": prompt,
        "token_ids": final[len(prompt) :],
        "text": None,
        "finish_reason": "length",
        "nfe": 16,
    }
    assert set(timings) == {"queued", "running", "total"}
    assert timings["running"] > 0
    assert timings["total"] == pytest.approx(timings["queued"] + timings["running"])


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


def test_every_sampling_parameter_is_an_option():
    parameters = inspect.signature(generate).parameters
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    del fields["return_history"]  # the output of every step is for Python
    assert {name: parameters[name].default for name in fields} == fields


class Listener:
    """Stands in for a model: keeps what it is asked for and has nothing to say."""

    tokenizer = None

    def __init__(self) -> None:
        self.asked: list[SamplingParams] = []

    def generate(self, *_: Any, sampling: SamplingParams, **__: Any) -> list[RequestOutput]:
        self.asked.append(sampling)
        return []


LLADA_OPTIONS = {
    "gen_length": 24,
    "steps": 6,
    "block_length": 8,
    "temperature": 0.5,
    "cfg_scale": 1.5,
    "remasking": "random",
    "transfer": "threshold",
    "threshold": 0.75,
    "threshold_strict": True,
    "factor": 1.25,
    "factor_end": "fixed",
    "entropy_bound": 0.5,
    "undefined_tokens": "official",
    "seed": 2**63,
}
DREAM_OPTIONS = {
    "gen_length": 24,
    "alg": "topk_margin",
    "alg_temp": 0.25,
    "eps": 0.01,
    "top_p": 0.5,
    "top_k": 7,
    "quota": "batch",
}
CACHE_OPTIONS = {
    "gen_length": 24,
    "block_length": 8,
    "cache": "head_sparse",
    "retention": 0.25,
    "pool_kernel": 5,
    "refresh_delay": 2,
    "refresh_interval": 4,
    "official_forcing": True,
}
OPTIONS = {"llada": LLADA_OPTIONS, "dream": DREAM_OPTIONS, "cache": CACHE_OPTIONS}


def as_arguments(options: dict[str, Any]) -> list[str]:
    """`{"top_k": 7, "threshold_strict": True}` as `--top-k 7 --threshold-strict`."""
    given = [[f"--{name.replace('_', '-')}", str(value)] for name, value in options.items()]
    return [part for pair in given for part in (pair[:1] if pair[1] == "True" else pair)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("command", ["generate", "eval"])
def test_options_become_sampling_parameters(command: str, options: dict[str, Any], use_model: UseModel):
    defaults = dataclasses.asdict(SamplingParams())
    assert all(defaults[name] != value for name, value in options.items())
    listener = Listener()
    use_model(listener)
    where = IDS if command == "generate" else ["--task", "addition", "--instances", "1"]
    CliRunner().invoke(app, [command, *where, *as_arguments(options)])
    assert listener.asked[-1] == SamplingParams(**options, early_stop=command == "generate")


def test_the_options_of_both_commands_are_all_tried():
    tried = {name for options in OPTIONS.values() for name in options}
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields & inspect.signature(evaluate).parameters.keys() == tried


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
    assert output["text"] == " ".join(f"w{i}" for i in output["token_ids"])


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
        (["--token-ids", "[[]]"], ["prompt is empty"]),
        (["--token-ids", "[[5,512]]"], ["token id 512", "position 1"]),
        (["--token-ids", "[[5,-1]]"], ["token id -1"]),
        (["--token-ids", "[[5,510]]"], ["mask id 510", "position 1"]),
        ([*IDS, "--gen-length", "16", "--block-length", "5"], ["not divisible by block_length 5"]),
        ([*IDS, "--gen-length", "16", "--block-length", "4", "--steps", "6"], ["steps 6 is not divisible"]),
        ([*IDS, "--gen-length", "0"], ["gen_length is 0"]),
        ([*IDS, "--temperature", "-0.5"], ["temperature is -0.5"]),
        ([*IDS, "--cfg-scale", "nan"], ["cfg_scale is nan"]),
        ([*IDS, "--remasking", "lowest"], ["remasking is 'lowest'", "'low_confidence', 'random'"]),
        ([*IDS, "--prompt-masks", "fill"], ["prompt_masks is 'fill'"]),
        ([*IDS, "--confidence-eos-eot-inf", "yes"], ["confidence_eos_eot_inf is 'yes'"]),
        ([*IDS, "--confidence-dtype", "int8"], ["confidence_dtype is 'int8'"]),
        ([*IDS, "--seed", "-1"], ["seed is -1"]),
        ([*IDS, "--transfer", "fastest"], ["transfer is 'fastest'", "'entropy_bound'"]),
        ([*IDS, "--alg", "fastest"], ["alg is 'fastest'", "'maskgit_plus'"]),
        ([*IDS, "--alg", "entropy", "--transfer", "factor"], ["alg 'entropy' brings its own order"]),
        ([*IDS, "--alg", "entropy", "--block-length", "8"], ["alg 'entropy' has blocks only with a cache"]),
        ([*IDS, "--top-k", "5"], ["top_k belongs to Dream's sampler"]),
        ([*IDS, "--alg", "confidence_threshold", "--steps", "100"], ["128 is not divisible by 100"]),
        ([*IDS, "--top-p", "1.5", "--alg", "entropy"], ["top_p is 1.5", "from 0 to 1"]),
        ([*IDS, "--threshold", "2e6"], ["threshold is 2000000.0"]),
        ([*IDS, "--undefined-tokens", "all"], ["undefined_tokens is 'all'"]),
        ([*IDS, "--cache", "window"], ["cache is 'window'", "'head_sparse'"]),
        ([*IDS, "--cache", "dual", "--cfg-scale", "1"], ["cache 'dual'", "set cfg_scale=0"]),
        ([*IDS, "--retention", "0"], ["retention is 0", "above 0"]),
        ([*IDS, "--pool-kernel", "2"], ["pool_kernel is 2", "odd"]),
        ([*IDS, "--refresh-delay", "-1"], ["refresh_delay is -1"]),
        ([*IDS, "--refresh-interval", "-1"], ["refresh_interval is -1"]),
        ([*IDS, "--dtype", "int8"], ["dtype is 'int8'"]),
        ([*IDS, "--gen-length", "many"], ["--gen-length"]),
        ([*IDS, "--no-such-option"], ["--no-such-option"]),
        (["w5", "w6"], ["w6"]),
    ],
)
def test_mistakes_in_the_request(args: list[str], words: list[str]):
    assert_mistake(run(*args), *words)


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
    assert_mistake(runner.invoke(app, ["generat"]), "generat")


def test_a_mistake_in_a_true_process():
    assert_mistake(process("generate", "--model", str(LLADA), "w5"), "tokenizer.json")


def test_an_overlong_prompt_warns(checkpoint: Checkpoint):
    directory = checkpoint(max_sequence_length=10)
    result = process("generate", "--model", str(directory), *IDS, *SHORT, "--json")
    assert result.returncode == 0
    assert len(json.loads(result.stdout)["outputs"][0]["token_ids"]) == 8
    assert result.stderr.startswith("warning: ")
    assert "10 positions" in result.stderr
    assert result.stderr.count("\n") == 1


def test_help_does_not_load_jax():
    code = (
        "import sys; from typer.testing import CliRunner; from jdllm.cli import app;"
        "result = CliRunner().invoke(app, ['generate', '--help']);"
        "assert '--gen-length' in result.stdout; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_terminal_without_a_prompt_is_not_waited_for():
    master, slave = pty.openpty()
    try:
        assert_mistake(process("generate", "--model", str(LLADA), stdin=slave), "no prompt")
    finally:
        os.close(master)
        os.close(slave)


def test_ctrl_c_exits_quietly(tmp_path: Path):
    os.mkfifo(tmp_path / "prompt")
    command = [sys.executable, "-m", "jdllm", "generate", "--file", str(tmp_path / "prompt")]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child,
        (tmp_path / "prompt").open("w"),  # opens only once the command reads
    ):
        child.send_signal(signal.SIGINT)
        stdout, stderr = child.communicate(timeout=60)
    assert (child.returncode, stdout, stderr) == (130, b"", b"")


def test_a_closed_pipe_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = process(
            *("generate", "--model", str(LLADA), *IDS, *SHORT),
            capture_output=False,
            stdout=writer,
            stderr=subprocess.PIPE,
        )
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


def test_the_text_fills_in_in_a_terminal(speaking: Path, loaded_speaking: LLM, tmp_path: Path):
    directory = tmp_path / "short context"
    shutil.copytree(speaking, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_sequence_length": 10}))
    master, slave = pty.openpty()
    environment = {"TERM": "xterm", "COLUMNS": "200", "PATH": os.environ["PATH"]}
    command = [sys.executable, "-m", "jdllm", "generate", "--model", str(directory), "w5 w6 w7", *SHORT]
    with subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=subprocess.PIPE, env=environment
    ) as child:
        os.close(slave)
        shown = _read_terminal(master).replace("\r\n", "\n")
        assert child.stderr is not None
        assert child.stderr.read().startswith(b"warning: ")
    assert child.returncode == 0
    assert "░" * 8 in shown
    assert "\x1b[2m" in shown
    sampling = SamplingParams(gen_length=8, early_stop=False)
    (expected,) = loaded_speaking.generate("w5 w6 w7", sampling=sampling)
    assert shown.endswith(f"{expected.text}\n")


def _read_terminal(master: int) -> str:
    chunks = []
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # how Linux reports that the other side was closed
            chunk = b""
        if not chunk:
            os.close(master)
            return b"".join(chunks).decode()
        chunks.append(chunk)


def test_live_response_keeps_committed_and_provisional_apart():
    response = LiveResponse(lambda ids: "".join(map(chr, ids)), start=2, length=5)
    response.take(_update([1, 2, 3, 4], "xabc", [True, False, True, False]))
    response.take(_update([2, 4], "AC", [True, False]))
    text = response.__rich__()
    assert text.plain == "AbC░░"
    styles = [text.get_style_at_offset(Console(), i).dim for i in range(5)]
    assert styles == [None, None, True, True, True]


def _update(positions: list[int], tokens: str, committed: list[bool]) -> StepUpdate:
    return StepUpdate(
        0, 0, np.array(positions, np.int32), np.array([ord(t) for t in tokens], np.int32), np.array(committed)
    )


class Calculator:
    """Stands in for a model: adds and subtracts, with two forward evaluations a prompt and step."""

    def __init__(self) -> None:
        self.calls: list[SamplingParams] = []

    def generate(self, *, prompt_token_ids: list[list[int]], sampling: SamplingParams) -> list[RequestOutput]:
        self.calls.append(sampling)
        return [self._answer(ids, sampling) for ids in prompt_token_ids]

    def _answer(self, ids: list[int], sampling: SamplingParams) -> RequestOutput:
        a, sign, b = re.fullmatch(r"(\d+)([+-])(\d+)=", bytes(ids).decode()).groups()  # pyright: ignore
        answer = [*str(int(a) + int(sign + b)).encode()]
        end = [EOS] * (sampling.gen_length - len(answer))
        assert sampling.steps is not None
        return RequestOutput(None, ids, answer + end, None, "stop", 2 * sampling.steps, Timings(0, 0))


def test_eval_scores_answers_and_counts_forwards(use_model: UseModel):
    calculator = Calculator()
    use_model(calculator)
    args = [
        "eval",
        "--task",
        "addition",
        "--instances",
        "50",
        "--steps",
        "4",
        "--block-length",
        "16",
        "--json",
    ]
    result = CliRunner().invoke(app, args)
    assert (result.exit_code, result.stderr) == (0, "")
    (task,) = json.loads(result.stdout)["tasks"]
    assert (task["task"], task["instances"], task["exact_match"]) == ("addition", 50, 1.0)
    assert task["baseline_exact_match"] < 0.5
    assert task["tokens_per_forward"] == 32 / 8
    assert task["seconds"] >= 0
    assert [(call.steps, call.gen_length, call.early_stop) for call in calculator.calls] == [
        (2, 32, False),
        (4, 32, False),
    ]


def test_eval_prints_a_table(use_model: UseModel):
    use_model(Calculator())
    args = ["eval", "--task", "subtraction", "--task", "addition", "--instances", "3", "--steps", "2"]
    result = CliRunner().invoke(app, args)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[0] for row in rows] == ["task", "subtraction", "addition"]
    assert [row[1:3] for row in rows[1:]] == [["3", "100.0%"], ["3", "100.0%"]]


@pytest.mark.parametrize(
    ("options", "forwards"),
    [
        ({}, 4 * 4),
        ({"cache": "sparse", "refresh_delay": 0}, 4 * 4),
        ({"cache": "dual", "transfer": "threshold", "threshold": 0.05}, None),
    ],
    ids=["none", "sparse", "dual-threshold"],
)
def test_the_timed_run_of_an_evaluation_compiles_nothing(
    options: dict[str, Any], forwards: int | None, monkeypatch: pytest.MonkeyPatch
):
    # A pool that starts small grows for the longest prompt, which comes last.
    monkeypatch.setattr("jdllm.serving.cached_runner._SMALLEST_POOL", 1)
    llm = LLM(LLADA, dtype="float32", max_num_batched_tokens=64)
    compiled: list[int] = []
    plain = llm.generate

    def generate_and_count(**kwargs: Any) -> list[RequestOutput]:
        outputs = plain(**kwargs)
        compiled.append(len(llm._engine._runner._executables))
        return outputs

    monkeypatch.setattr(llm, "generate", generate_and_count)
    sampling = SamplingParams(gen_length=16, block_length=8, steps=4, early_stop=False, **options)
    prompts = [[5] * n for n in (3, 40, 9, 170)]
    generation = generator(llm, sampling)(prompts)
    assert compiled[-2] == compiled[-1] > 1
    expected = plain(prompt_token_ids=prompts, sampling=sampling)
    assert generation.outputs == [o.token_ids for o in expected]
    assert generation.committed == 64
    assert generation.forwards == (forwards or sum(o.nfe for o in expected))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--task", "cooking"], ["unknown demo task 'cooking'", "addition"]),
        (["--instances", "0"], ["count 0"]),
        (["--steps", "0"], ["steps is 0"]),
        (["--gen-length", "16", "--block-length", "32"], ["not divisible by block_length 32"]),
        (["--model", "no such directory"], ["no such directory"]),
    ],
)
def test_mistakes_in_an_evaluation(args: list[str], words: list[str]):
    assert_mistake(CliRunner().invoke(app, ["eval", "--model", str(LLADA), *args]), *words)
