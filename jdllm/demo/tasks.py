"""The demo's tasks: pure generators of (prompt, answer), and the split into training and test instances.

Prompts and answers are plain ASCII text without a chat template. An instance belongs to the test set or to
the training set by a hash of its text, so the two can never share one, whoever draws them and in what order.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np

from jdllm.errors import RequestError

GEN_LENGTH = 32
"""Response positions of every instance: the answer, then end-of-sequence fill."""

MAX_LENGTH = 512
"""Longest prompt and response together, in tokens; one ASCII character is one token."""

TEST_SHARE = 0.1
"""Share of all instances that the hash puts into the test set."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"
BRACKETS = {"(": ")", "[": "]", "{": "}"}
NAMES = ("Tom", "Ann", "Bob", "Eva", "Max", "Zoe", "Leo", "Mia", "Sam", "Ida", "Ben", "Amy")
COLORS = ("red", "blue", "green", "black", "white", "brown", "gray", "pink")
THINGS = (
    *("cups", "hats", "keys", "pens", "bags", "balls"),
    *("books", "coins", "lamps", "boxes", "plums", "kites"),
)

Split = Literal["train", "test"]


class Instance(NamedTuple):
    """One question and its only right answer."""

    task: str
    prompt: str
    answer: str


@dataclasses.dataclass(frozen=True)
class Task:
    """A generator of instances.

    - `draw(rng, room)`: a random prompt of at most `room` characters and its answer. Only tasks whose
      prompts vary beyond `min_room` look at `room`.
    - `min_room`: characters that suffice for every prompt, or, where `draw` looks at `room`, for one.
    """

    name: str
    draw: Callable[[np.random.Generator, int], tuple[str, str]]
    min_room: int


def number(rng: np.random.Generator) -> int:
    """A number of 1 to 4 digits; d digits have probability d / 10, since long numbers are the hard ones."""
    digits = (1, 2, 2, 3, 3, 3, 4, 4, 4, 4)[int(rng.integers(10))]
    return int(rng.integers(10 ** (digits - 1) if digits > 1 else 0, 10**digits))


def letters(rng: np.random.Generator, count: int, alphabet: str = LETTERS) -> str:
    return "".join([alphabet[i] for i in rng.integers(len(alphabet), size=count).tolist()])


def draw_addition(rng: np.random.Generator, room: int) -> tuple[str, str]:
    a, b = number(rng), number(rng)
    return f"{a}+{b}=", str(a + b)


def draw_subtraction(rng: np.random.Generator, room: int) -> tuple[str, str]:
    a, b = number(rng), number(rng)
    return f"{a}-{b}=", str(a - b)


def draw_sorting(rng: np.random.Generator, room: int) -> tuple[str, str]:
    alphabet = "0123456789" if rng.random() < 0.5 else LETTERS
    text = letters(rng, int(rng.integers(3, 11)), alphabet)
    return f"sort {text}=", "".join(sorted(text))


def draw_reversal(rng: np.random.Generator, room: int) -> tuple[str, str]:
    text = letters(rng, int(rng.integers(3, 13)))
    return f"reverse {text}=", text[::-1]


def draw_constrained_copy(rng: np.random.Generator, room: int) -> tuple[str, str]:
    """Copy a text without one letter, which occurs in it: of a text of that letter alone nothing is left."""
    text = letters(rng, int(rng.integers(4, 13)), letters(rng, 5))
    dropped = text[int(rng.integers(len(text)))]
    return f"copy {text} without {dropped}=", text.replace(dropped, "")


def draw_brackets(rng: np.random.Generator, room: int) -> tuple[str, str]:
    """Close what a text of up to 14 brackets leaves open."""
    count = int(rng.integers(2, 15))
    opens, kinds = (rng.random(count) < 0.65).tolist(), letters(rng, count, "([{")
    text, open_now = "", ""
    for is_open, kind in zip(opens, kinds, strict=True):
        if is_open or not open_now:
            text, open_now = text + kind, open_now + kind
        else:
            text, open_now = text + BRACKETS[open_now[-1]], open_now[:-1]
    if not open_now:
        text, open_now = text + kinds[0], kinds[0]
    return f"close {text}=", "".join(BRACKETS[kind] for kind in reversed(open_now))


def draw_retrieval(rng: np.random.Generator, room: int) -> tuple[str, str]:
    """Find the value of one of many distinct keys; the number of pairs is uniform up to what fits."""
    question, pair = len("get aa="), len("aa=000;")
    count = int(rng.integers(1, (room - question) // pair + 1))
    keys = rng.choice(26 * 26, size=count, replace=False).tolist()
    values = rng.integers(1000, size=count).tolist()
    names = [LETTERS[key // 26] + LETTERS[key % 26] for key in keys]
    asked = int(rng.integers(count))
    context = "".join([f"{name}={value:03d};" for name, value in zip(names, values, strict=True)])
    return f"{context}get {names[asked]}=", f"{values[asked]:03d}"


def draw_question(rng: np.random.Generator, room: int) -> tuple[str, str]:
    """Two sentences about who owns what, and a question about one of them, answered by a sentence."""
    names, things, colors = len(NAMES), len(THINGS), len(COLORS)
    draws = rng.integers([names, names - 1, things, things - 1, colors, colors - 1, 8, 8, 2, 4]).tolist()
    name = NAMES[draws[0]], NAMES[(draws[0] + 1 + draws[1]) % names]
    thing = THINGS[draws[2]], THINGS[(draws[2] + 1 + draws[3]) % things]
    color = COLORS[draws[4]], COLORS[(draws[4] + 1 + draws[5]) % colors]
    count = draws[6] + 2, draws[7] + 2
    story = " ".join([f"{name[i]} has {count[i]} {color[i]} {thing[i]}." for i in (0, 1)])
    i = draws[8]
    question, answer = (
        (f"Who has {thing[i]}?", f"{name[i]} has the {thing[i]}."),
        (f"How many {thing[i]} are there?", f"There are {count[i]} {thing[i]}."),
        (f"What color are the {thing[i]}?", f"The {thing[i]} are {color[i]}."),
        (f"What does {name[i]} have?", f"{name[i]} has {color[i]} {thing[i]}."),
    )[draws[9]]
    return f"{story} {question}", answer


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("addition", draw_addition, 10),
        Task("subtraction", draw_subtraction, 10),
        Task("retrieval", draw_retrieval, 14),
        Task("sorting", draw_sorting, 16),
        Task("reversal", draw_reversal, 21),
        Task("constrained copy", draw_constrained_copy, 28),
        Task("brackets", draw_brackets, 22),
        Task("questions", draw_question, 71),
    )
}


def split_of(instance: Instance) -> Split:
    """The set that an instance belongs to, by the SHA-256 of its task, prompt and answer."""
    digest = hashlib.sha256("\0".join(instance).encode()).digest()
    return "test" if int.from_bytes(digest[:8]) < TEST_SHARE * 2**64 else "train"


def stream(
    task: str, split: Split, rng: np.random.Generator, room: int = MAX_LENGTH - GEN_LENGTH
) -> Iterator[Instance]:
    """Endless random instances of one task and one split, repetitions included.

    Arguments:
    - `task`: a key of `TASKS`.
    - `split`: "train" or "test".
    - `rng`: the source of all randomness.
    - `room`: longest prompt, in characters.

    Raises `RequestError` for an unknown task or a room that the task does not fit into.
    """
    chosen = find_task(task)
    if room < chosen.min_room:
        raise RequestError(f"room is {room}, expected at least {chosen.min_room} characters for {task!r}")
    while True:
        instance = Instance(task, *chosen.draw(rng, room))
        if split_of(instance) == split:
            yield instance


def distinct_instances(task: str, split: Split, count: int, seed: int) -> list[Instance]:
    """`count` different instances of one task and split.

    Arguments:
    - `task`: a key of `TASKS`.
    - `split`: "train" or "test".
    - `count`: how many; every task has many times 1000 of either split.
    - `seed`: the same seed gives the same list; a longer list begins with a shorter one.

    Raises `RequestError` for an unknown task.
    """
    rng = np.random.default_rng([seed, list(TASKS).index(find_task(task).name)])
    found: dict[Instance, None] = {}
    for instance in stream(task, split, rng):
        if len(found) == count:
            break
        found.setdefault(instance)
    return list(found)


def test_instances(task: str, count: int, seed: int) -> list[Instance]:
    """`count` different instances that training never saw; see `distinct_instances`."""
    return distinct_instances(task, "test", count, seed)


def find_task(name: str) -> Task:
    """The task of that name, or `RequestError` with the known names."""
    if name not in TASKS:
        raise RequestError(f"unknown demo task {name!r}: choose from {', '.join(TASKS)}")
    return TASKS[name]
