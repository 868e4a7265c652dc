"""`jdllm eval --harness`: what reaches lm-eval, and what is refused before it is asked; no lm-eval needed."""

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from jdllm.cli.evaluate import EvalCommand, evaluate
from jdllm.cli.report import Commands
from jdllm.demo import checkpoint_path
from jdllm.demo.tasks import GEN_LENGTH, TASKS
from jdllm.harness.arguments import with_defaults
from tests.cli.helpers import assert_mistake

FILES = checkpoint_path().parent / "harness_tasks"
OURS = ["--include_path", "tasks"]
MODEL = ["--model", "jdllm"]

app = typer.Typer(cls=Commands, add_completion=False, rich_markup_mode=None)
app.command("eval", cls=EvalCommand)(evaluate)
app.command("other")(lambda: None)  # with one command only, typer leaves its name out


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Every call of lm-eval, by its arguments."""
    calls: list[list[str]] = []
    monkeypatch.setattr("jdllm.cli.evaluate.run_harness", calls.append)
    return calls


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tasks", "jdllm_demo", "--model_args", "mc_num=8", "--seed", "3", "--limit=4"],
        ["--help"],
        ["ls", "tasks"],
        ["--model", "hf", "--json", "--", "--task"],
        [],
    ],
)
def test_everything_behind_it_is_lm_evals(arguments: list[str], asked: list[list[str]]):
    result = CliRunner().invoke(app, ["eval", "--harness", *arguments])
    assert (result.exit_code, result.output) == (0, "")
    assert asked == [arguments]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "sorting", "--harness", "--tasks", "x"], ["--task stands before --harness"]),
        (["sorting"], ["unexpected argument 'sorting'", "--harness"]),
    ],
)
def test_mistakes(arguments: list[str], words: list[str], asked: list[list[str]]):
    assert_mistake(CliRunner().invoke(app, ["eval", *arguments]), *words)
    assert not asked


def test_without_lm_eval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["eval", "--harness", "--tasks", "jdllm_demo"])
    assert_mistake(result, "needs lm-eval", "jdllm[harness]")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], []),
        (["--tasks", "x"], ["run", "--tasks", "x", *OURS, *MODEL]),
        (["run", "--tasks", "x"], ["run", "--tasks", "x", *OURS, *MODEL]),
        (["--model", "hf"], ["run", "--model", "hf", *OURS]),
        (["--model=hf"], ["run", "--model=hf", *OURS]),
        (["-M", "hf"], ["run", "-M", "hf", *OURS]),
        (["--include_path", "own"], ["run", "--include_path", "own", *MODEL]),
        (["--include_path=own", "-M", "hf"], ["run", "--include_path=own", "-M", "hf"]),
        (["ls", "tasks"], ["ls", "tasks", *OURS]),
        (["validate", "--tasks", "x"], ["validate", "--tasks", "x", *OURS]),
    ],
)
def test_our_model_and_tasks_where_no_others_are_named(arguments: list[str], expected: list[str]):
    assert with_defaults(arguments, Path("tasks")) == expected


def test_every_task_of_the_demo_has_a_file():
    names = {}
    for file in FILES.glob("*.yaml"):
        text = file.read_text()
        of_task = re.fullmatch(r"include: _generate_yaml\ntask: (\w+)\ndataset_kwargs:\n  task: (.+)\n", text)
        if of_task is not None:
            names[of_task[2]] = of_task[1]
    assert names == {name: "jdllm_demo_" + name.replace(" ", "_") for name in TASKS}
    listed = re.findall(r"^  - (jdllm_\w+)$", (FILES / "group.yaml").read_text(), re.MULTILINE)
    assert listed == list(names[name] for name in TASKS)
    assert f"max_gen_toks: {GEN_LENGTH}\n" in (FILES / "_generate_yaml").read_text()
