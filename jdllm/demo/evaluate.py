"""Score a sampler on the demo's tasks, beside a baseline that only looks training strings up."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Float32

from jdllm.demo import MAX_INSTANCES
from jdllm.demo.tasks import TASKS, Instance, distinct_instances, test_instances
from jdllm.demo.tokenizer import answer_text, plain_ids
from jdllm.errors import RequestError

BASELINE_INSTANCES = 5000
"""Training instances of each task that the baseline knows."""

TEST_SEED = 1
"""Of the held-out instances that every model is asked."""

_FEATURES = 4096
_TRAIN_SEED = 2


@dataclasses.dataclass(frozen=True)
class Generation:
    """What a sampler did with some prompts.

    - `outputs`: generated ids of each prompt, in order; what follows the first end id is ignored.
    - `committed`: response positions filled, end-of-sequence fill included, over all prompts.
    - `forwards`: forward evaluations, each prompt's counted for itself, however they were batched.
    - `seconds`: wall time of the generation, without loading or compiling.
    """

    outputs: Sequence[Sequence[int]]
    committed: int
    forwards: int
    seconds: float


Generate = Callable[[list[list[int]]], Generation]
"""Answers token prompts with at least `GEN_LENGTH` response positions each."""


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """Figures of one task.

    - `instances`: test instances, none of which training saw.
    - `exact_match`: share of answers that equal the right one.
    - `baseline_exact_match`: the same for the answer of the most similar training prompt.
    - `baseline_instances`: training instances that the baseline chose from.
    - `tokens_per_forward`: response positions filled per forward evaluation.
    - `seconds`: wall time of all instances.
    """

    task: str
    instances: int
    exact_match: float
    baseline_exact_match: float
    baseline_instances: int
    tokens_per_forward: float
    seconds: float


def evaluate(
    generate: Generate,
    tasks: Iterable[str] = tuple(TASKS),
    count: int = 1000,
    baseline_instances: int = BASELINE_INSTANCES,
) -> list[TaskResult]:
    """Score `generate` on held-out instances.

    Arguments:
    - `generate`: the sampler; called once for each task.
    - `tasks`: keys of `TASKS`.
    - `count`: test instances of each task, at most `MAX_INSTANCES`; always the first of the same list.
    - `baseline_instances`: training instances that the baseline knows, at most as many.

    Returns one result for each task.

    Raises `RequestError` for an unknown task or a count that is not positive or too large.
    """
    if not (1 <= count <= MAX_INSTANCES and 1 <= baseline_instances <= MAX_INSTANCES):
        raise RequestError(
            f"count {count}, baseline_instances {baseline_instances}: expected 1 to {MAX_INSTANCES} each"
        )
    return [_evaluate_task(generate, task, count, baseline_instances) for task in tasks]


def _evaluate_task(generate: Generate, task: str, count: int, baseline_instances: int) -> TaskResult:
    test = test_instances(task, count, TEST_SEED)
    known = distinct_instances(task, "train", baseline_instances, _TRAIN_SEED)
    generation = generate([plain_ids(instance.prompt) for instance in test])
    answers = [answer_text(list(output)) for output in generation.outputs]
    return TaskResult(
        task,
        count,
        _share_right(answers, test),
        _share_right(nearest_answers(test, known), test),
        baseline_instances,
        generation.committed / generation.forwards,
        generation.seconds,
    )


def _share_right(answers: Sequence[str], instances: Sequence[Instance]) -> float:
    return sum(a == i.answer for a, i in zip(answers, instances, strict=True)) / len(instances)


def nearest_answers(questions: Sequence[Instance], known: Sequence[Instance]) -> list[str]:
    """Answer each question like the known instance with the most similar prompt.

    Similarity is the cosine between counts of character 1-, 2- and 3-grams, hashed to 4096 features; of
    equals the first known one is taken.

    Arguments:
    - `questions`: whose prompts are looked up; their answers are not used.
    - `known`: prompts with answers.

    Returns one answer for each question.
    """
    similarity = _features(questions) @ _features(known).T
    return [known[i].answer for i in similarity.argmax(axis=1).tolist()]


def _features(instances: Sequence[Instance]) -> Float32[np.ndarray, "instances features"]:
    """Normalised n-gram counts of each prompt."""
    rows = np.zeros((len(instances), _FEATURES), np.float32)
    for row, instance in zip(rows, instances, strict=True):
        text = np.frombuffer(instance.prompt.encode(), np.uint8).astype(np.int64)
        for n in (1, 2, 3):
            grams = [text[i : len(text) - n + 1 + i] for i in range(n)]
            # Knuth's multiplicative hash; the middle bits depend on all characters of the n-gram.
            code = functools.reduce(lambda code, part: code * 257 + part, grams, np.int64(n))
            row += np.bincount((code * 2654435761 >> 16) % _FEATURES, minlength=_FEATURES)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def render_table(results: Sequence[TaskResult]) -> str:
    """The results as an aligned text table."""
    header = ("task", "instances", "exact match", "nearest string", "tokens/forward", "seconds")
    body = [
        (
            result.task,
            str(result.instances),
            f"{result.exact_match:.1%}",
            f"{result.baseline_exact_match:.1%}",
            f"{result.tokens_per_forward:.2f}",
            f"{result.seconds:.2f}",
        )
        for result in results
    ]
    return aligned(header, body)


def aligned(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A text table whose first column is flush left, and the others flush right."""
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]

    def line(cells: Sequence[str]) -> str:
        numbers = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join([cells[0].ljust(widths[0]), *numbers])

    return "\n".join(line(cells) for cells in (header, *body))
