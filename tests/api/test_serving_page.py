"""docs/serving.md and what it sends along, beside the command and the metrics that there are."""

import configparser
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import typer.main

from jdllm.api.metrics import Metrics
from jdllm.cli import app
from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from tests.engines import engine_of, finish, generation_request

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text()


def first_column(heading: str) -> set[str]:
    """What stands in backticks in the first column of a table, from its heading on."""
    table = PAGE.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.fixture(scope="module")
def options() -> set[str]:
    """The long options of `jdllm serve`."""
    command = typer.main.get_command(app)
    serve = command.commands["serve"]  # type: ignore[attr-defined]
    return {
        name
        for parameter in serve.params
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("--")
    }


def test_the_table_of_options_is_that_of_the_command(options):
    assert first_column("option") == options - {"--help"}


def test_the_table_of_metrics_is_what_a_server_answers(
    params: Params, config: ModelConfig, executables: Executables
):
    engine = engine_of(params, config, executables, 128)
    metrics = Metrics("tiny", engine, executables)
    engine.observe = metrics.observe_part
    finish(engine, [generation_request(0, np.arange(1, 6), SamplingParams(gen_length=8), config)])
    metrics.request_ended("/v1/completions", 200, 0.3, 0.1, 5, 8)
    lines = metrics.render().decode().splitlines()
    answered: dict[str, set[str]] = {}
    for line in lines:
        if line.startswith(("jdllm_", "vllm:")):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            name = re.sub(r"_(sum|count|bucket|created)$", "", name)
            answered.setdefault(name, set()).update(set(re.findall(r'(\w+)="', labels)) - {"le"})
    # Counters have a creation time under their name without `_total`.
    answered = {name: labels for name, labels in answered.items() if f"{name}_total" not in answered}
    told = {}
    for entry in first_column("metric"):
        name, _, labels = entry.partition("{")
        told[name] = set(filter(None, labels.rstrip("}").split(",")))
    for name in told:
        told[name] |= {"model_name"} if name.startswith("vllm:") else set()
    assert told == answered


def test_commands_of_the_page_name_options_that_there_are(options):
    continued = re.sub(r"\\\n\s+", "", PAGE)
    served = re.findall(r"jdllm serve(?![\w.]) *([^\n#`]*)", continued.split("## How fast it is")[0])
    assert sum("--host" in arguments for arguments in served) >= 1
    for arguments in served:
        assert {word for word in shlex.split(arguments) if word.startswith("--")} <= options


def test_the_unit_gives_up_where_starting_again_would_not_help():
    """Exit codes of the command: 1 is worth another start, 2 and 3 are mistakes."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((ROOT / "docs" / "jdllm.service").read_text())
    service = unit["Service"]
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"].split() == ["2", "3"]
    assert shlex.split(service["ExecStart"])[1:] == ["serve", "$JDLLM_OPTIONS"]
