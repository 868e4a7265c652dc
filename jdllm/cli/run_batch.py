"""`jdllm run-batch`: a file of requests in OpenAI's batch format."""

import collections
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from jdllm.cli.asked_server import check_installed, names_of
from jdllm.cli.compiling import told_of_compiling
from jdllm.cli.engine import ModelArgument, ModelOptions, load_model, takes_model
from jdllm.cli.options import ServedNames
from jdllm.cli.prompt import read_text
from jdllm.cli.report import print_result
from jdllm.errors import RequestError

_COUNTED = ("answered", "refused", "wrong lines", "answered before")


@takes_model
def run_batch(
    requests: Annotated[
        Path,
        typer.Argument(metavar="IN.jsonl", help="The requests; - for standard input.", show_default=False),
    ],
    answers: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="Where answers are appended.", show_default=False)
    ],
    model: ModelArgument = None,
    served_model_name: ServedNames = None,
    *,
    source: ModelOptions,
) -> None:
    """Answer a file of requests in OpenAI's batch format, as a server of the model would.

    A line of IN.jsonl is {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}};
    the url may be /v1/completions, /v1/responses, /v1/infill and /v1/score too. A line of OUT.jsonl is {"id":
    ..., "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null},
    in the order in which answers come. A request that is refused gets a line that says why, and the others go
    on. What OUT.jsonl has answers of is not asked again: after it was killed, the same command goes on.
    """
    check_installed("run-batch", "fastapi", "httpx", "prometheus_client")
    from jdllm.api.batch import AnswerFile, EngineDeadError, read_requests
    from jdllm.api.batch import run_batch as run
    from jdllm.progress import counted

    text = read_text(None if str(requests) == "-" else requests, "requests", "the file")
    if answers.exists() and requests.exists() and answers.samefile(requests):
        raise RequestError(f"{answers} has the requests: name another file for the answers")
    tasks, wrong = read_requests(text)
    counts = collections.Counter()
    with AnswerFile(answers) as file:
        left = [task for task in tasks if task.custom_id not in file.known]
        for one in wrong:
            if one.key not in file.known:
                file.add(one.answer())
                counts["wrong lines"] += 1
        counts["answered before"] = len(tasks) - len(left) + len(wrong) - counts["wrong lines"]
        with counted("answering", len(left), progress=True) as show, told_of_compiling():

            def add(line: dict[str, Any]) -> None:
                file.add(line)
                counts["answered" if line["response"]["status_code"] == 200 else "refused"] += 1
                show(counts["answered"] + counts["refused"])

            try:
                if left:
                    run(load_model(source), names_of(served_model_name, source.model), left, add)
            except EngineDeadError as e:
                print(f"error: {e}; the same command goes on from here", file=sys.stderr)
                raise typer.Exit(1) from None
    print_result(", ".join(f"{what} {counts[what]}" for what in _COUNTED))
