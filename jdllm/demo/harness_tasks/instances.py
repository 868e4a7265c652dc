"""The demo's test instances as data sets, for the task files beside this one."""

from typing import Any

from datasets import Dataset  # pyright: ignore[reportMissingImports]

from jdllm.demo.tasks import test_instances

INSTANCES = 1000
SEED = 1
"""As `jdllm eval` has them: the first of the same list."""


def load(task: str, **_: Any) -> dict[str, Dataset]:
    """The test split of a task: `prompt` and `answer`."""
    instances = test_instances(task, INSTANCES, SEED)
    return {"test": Dataset.from_list([{"prompt": one.prompt, "answer": one.answer} for one in instances])}


def load_choices(task: str, **_: Any) -> dict[str, Dataset]:
    """The same for a task whose answers are numbers, each among three that are close to it."""
    rows = []
    for one in test_instances(task, INSTANCES, SEED):
        right = int(one.answer)
        choices = sorted({right - 10, right, right + 1, right + 10})
        rows.append({"prompt": one.prompt, "choices": list(map(str, choices)), "gold": choices.index(right)})
    return {"test": Dataset.from_list(rows)}
