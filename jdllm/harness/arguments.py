"""Arguments of lm-eval's command line that a user need not give."""

from collections.abc import Sequence
from pathlib import Path

MODEL = "jdllm"
"""The name of our model class in lm-eval."""

_OTHER_COMMANDS = ("ls", "validate")


def with_defaults(arguments: Sequence[str], tasks: Path) -> list[str]:
    """lm-eval's arguments, with our model and our tasks where they name no others.

    Arguments:
    - `arguments`: of `run`, which need not be named, or of another command.
    - `tasks`: directory of further task files.
    """
    if not arguments:
        return []
    names = {argument.split("=", 1)[0] for argument in arguments}
    command = [] if arguments[0] in ("run", *_OTHER_COMMANDS) else ["run"]
    added = [] if "--include_path" in names else ["--include_path", str(tasks)]
    if arguments[0] not in _OTHER_COMMANDS and not names & {"--model", "-M"}:
        added += ["--model", MODEL]
    return [*command, *arguments, *added]
