import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jdllm.demo import tasks
from jdllm.demo.tasks import GEN_LENGTH, MAX_LENGTH, TASKS, Instance, distinct_instances, split_of, stream
from jdllm.errors import RequestError


def closes(prompt: str) -> str:
    """Cancel matched pairs until none is left, then mirror what remains."""
    text = prompt
    while (shorter := re.sub(r"\(\)|\[\]|\{\}", "", text)) != text:
        text = shorter
    return text[::-1].translate(str.maketrans("([{", ")]}"))


def reads(prompt: str) -> str:
    """Answer a question from the parsed story."""
    facts = re.findall(r"(\w+) has (\d) (\w+) (\w+)\.", prompt)
    question = prompt.split(". ")[-1]
    (fact,) = [f for f in facts if re.search(rf"\b({f[3]}|does {f[0]})\b", question)]
    name, count, color, thing = fact
    if question.startswith("Who"):
        return f"{name} has the {thing}."
    if question.startswith("How many"):
        return f"There are {count} {thing}."
    if question.startswith("What color"):
        return f"The {thing} are {color}."
    return f"{name} has {color} {thing}."


def oracle(task: str, prompt: str) -> str:
    """The right answer, worked out from the prompt's text alone."""
    if task == "questions":
        return reads(prompt)
    body, ending = prompt[:-1], prompt[-1]
    assert ending == "="
    match task:
        case "addition":
            return str(sum(int(n) for n in body.split("+")))
        case "subtraction":
            left, right = body.split("-")
            return str(int(left) - int(right))
        case "sorting":
            return "".join(sorted(body.removeprefix("sort ")))
        case "reversal":
            return "".join(reversed(body.removeprefix("reverse ")))
        case "constrained copy":
            text, dropped = body.removeprefix("copy ").split(" without ")
            return "".join(c for c in text if c != dropped)
        case "brackets":
            return closes(body.removeprefix("close "))
        case "retrieval":
            context, asked = body.split("get ")
            pairs = [pair.split("=") for pair in context.split(";")[:-1]]
            assert len({key for key, _ in pairs}) == len(pairs)
            return dict(pairs)[asked]
    raise AssertionError(task)


@pytest.mark.parametrize("task", TASKS)
@given(seed=st.integers(0, 2**32 - 1))
@example(seed=3110)  # "copy aaaa without a="
@settings(max_examples=50, deadline=None)
def test_answers_are_right_and_fit(task: str, seed: int):
    source = stream(task, "train", np.random.default_rng(seed))
    for instance in (next(source) for _ in range(5)):
        assert instance.answer == oracle(task, instance.prompt)
        assert len(instance.prompt) + GEN_LENGTH <= MAX_LENGTH
        assert instance.answer or task == "constrained copy"
        assert len(instance.answer) < GEN_LENGTH - 1
        assert instance.prompt.isascii()


@pytest.mark.parametrize("task", TASKS)
def test_prompts_fit_the_room_that_the_task_asks_for(task: str):
    room = TASKS[task].min_room
    source = stream(task, "train", np.random.default_rng(0), room)
    assert max(len(next(source).prompt) for _ in range(500)) <= room


@pytest.mark.parametrize("task", TASKS)
def test_training_and_test_instances_are_disjoint(task: str):
    source = stream(task, "train", np.random.default_rng(7))
    seen = {next(source) for _ in range(3000)}
    test = tasks.test_instances(task, 1000, seed=0)
    assert len(set(test)) == 1000
    assert not seen & set(test)


def test_the_split_is_pinned():
    """A changed hash would silently move training instances of the bundled checkpoint into the test set."""
    source = [Instance("addition", f"{n}+1=", str(n + 1)) for n in range(1000)]
    in_test = [n for n, instance in enumerate(source) if split_of(instance) == "test"]
    assert in_test[:5] == [4, 8, 10, 31, 32]
    assert 70 <= len(in_test) <= 130


def test_lists_depend_on_the_seed_only():
    first = distinct_instances("sorting", "train", 50, seed=4)
    assert distinct_instances("sorting", "train", 80, seed=4)[:50] == first
    assert distinct_instances("sorting", "train", 50, seed=5) != first


def test_retrieval_contexts_reach_the_full_length():
    lengths = [len(i.prompt) + GEN_LENGTH for i in tasks.test_instances("retrieval", 1000, seed=0)]
    assert max(lengths) > MAX_LENGTH - 8
    assert min(lengths) < 64


def test_unknown_task_and_small_room_are_refused():
    with pytest.raises(RequestError, match=r"unknown demo task 'juggling'.*addition"):
        tasks.test_instances("juggling", 1, seed=0)
    with pytest.raises(RequestError, match="at least 71 characters"):
        next(stream("questions", "train", np.random.default_rng(0), room=70))
