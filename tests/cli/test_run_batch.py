"""`jdllm run-batch`: requests of a file, and how a run goes on."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from jdllm.cli import app
from jdllm.llm import LLM
from tests.cli.helpers import UseModel, assert_mistake

COMPLETIONS = "/v1/completions"


def request(custom_id: str, url: str = COMPLETIONS, **body: Any) -> str:
    body = {"prompt": "w5 w6", "max_tokens": 4, "ignore_eos": True} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def run(*options: str, **how: Any) -> Result:
    return CliRunner().invoke(app, ["run-batch", *options], **how)


def answers(path: Path) -> dict[Any, Any]:
    read = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line for line in read}
    assert len(found) == len(read)
    return found


def test_answers_refusals_and_wrong_lines(loaded_speaking: LLM, use_model: UseModel, tmp_path: Path):
    use_model(loaded_speaking)
    asked, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("\ufeff" + "\n".join([request("a"), "{", request("b", n=0), request("c", model="mine")]))
    result = run(str(asked), str(out), "--served-model-name", "mine")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "answered 2, refused 1, wrong lines 1, answered before 0\n"
    found = answers(out)
    assert found["a"]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert found["c"]["response"]["body"]["model"] == "mine"
    assert found["b"]["response"]["status_code"] == 400
    assert found[None]["error"]["message"].startswith("line 2")

    written = out.read_text()
    asked.write_text(asked.read_text() + "\n" + request("d"))
    result = run("-", str(out), "--served-model-name", "mine", input=asked.read_text())
    assert result.stdout == "answered 1, refused 0, wrong lines 0, answered before 4\n"
    assert out.read_text().startswith(written)
    assert list(answers(out))[-1] == "d"


def test_mistakes_come_before_the_model(tmp_path: Path):
    asked, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text(request("a") + "\n" + request("a") + "\n")
    assert_mistake(run(str(asked), str(out)), "lines 1 and 2 have one custom_id, 'a'")
    assert not out.exists()
    asked.write_text(request("a") + "\n")
    assert_mistake(run(str(asked), str(asked)), "name another file")
    assert_mistake(run(str(asked), str(tmp_path / "absent" / "out")), "cannot be written")
    assert_mistake(run(str(tmp_path / "absent"), str(out)), "absent cannot be read")
    out.write_text("notes\n")
    assert_mistake(run(str(asked), str(out)), "is no answer of a batch")


@pytest.mark.slow
def test_a_killed_run_goes_on(speaking: Path, tmp_path: Path):
    asked, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("\n".join(request(f"{i}", max_tokens=4 * (1 + i // 32)) for i in range(320)))
    command = [sys.executable, "-m", "jdllm", "run-batch", str(asked), str(out), str(speaking)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        while not out.exists() or not out.stat().st_size:
            assert child.poll() is None
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
    before = out.read_bytes()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert out.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    assert set(answers(out)) == {f"{i}" for i in range(320)}
    known = before.count(b"\n")
    assert 0 < known < 320
    assert done.stdout == f"answered {320 - known}, refused 0, wrong lines 0, answered before {known}\n"
