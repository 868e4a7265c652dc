"""Long texts with many facts in them, and questions about one: what the demo's retrieval model is trained on.

A text is cut anywhere, so that a fact may be cut too; who asks chooses one that is whole. No text is in both
splits: the hash of `jdllm.demo.tasks.split_of` decides.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from jdllm.demo.tasks import COLORS, LETTERS, NAMES, THINGS, Instance, Split, split_of
from jdllm.errors import RequestError

INSTRUCTION = "Answer from the text.\n"
"""What may stand before a text."""

ABSENT = "none"
"""The answer to a question about what the text does not tell."""

KEY_LETTERS = 4
"""Of the keys of pairs: enough for more distinct ones than 128k tokens hold."""

_KINDS = ("old", "new", "big", "small", "slow", "quiet", "tall", "wet")
_SUBJECTS = ("bus", "dog", "river", "train", "wind", "cat", "road", "boat", "clock", "bird", "door", "rain")
_VERBS = ("stops", "turns", "waits", "sleeps", "moves", "ends", "stays", "shines", "stands", "falls")
_PLACES = ("lake", "house", "school", "hill", "bridge", "garden", "market", "wall", "tower", "field")

_SENTENCES_OF_A_FACT = 4
_MOST_FACTS = 96
_SHORTEST_SENTENCE, _MEAN_SENTENCE = len("Tom has 2 red cups. "), 32


class Fact(NamedTuple):
    """A part of a text, `[start, stop)` in characters, with a question that it answers."""

    start: int
    stop: int
    query: str
    answer: str


class Haystack(NamedTuple):
    """A text and what may be asked about it.

    - `facts`: in the order of the text; no two answer the same question.
    - `absent`: a question of the same kind that nothing in the text answers.
    """

    text: str
    facts: list[Fact]
    absent: str

    def crop(self, start: int, stop: int) -> "Haystack":
        """The characters `[start, stop)`, with the facts that are whole in them."""
        facts = [
            fact._replace(start=fact.start - start, stop=fact.stop - start)
            for fact in self.facts
            if start <= fact.start and fact.stop <= stop
        ]
        return Haystack(self.text[start:stop], facts, self.absent)


def draw_pairs(rng: np.random.Generator, length: int, key_letters: int = KEY_LETTERS) -> Haystack:
    """Distinct keys with values, `abcd=123;`.

    Arguments:
    - `length`: characters, of which the last ones may be a part of a pair.
    - `key_letters`: of each key.

    Raises `RequestError` where there are not so many keys.
    """
    width = key_letters + len("=000;")
    count = -(-length // width)
    if count >= 26**key_letters:
        raise RequestError(
            f"{length} characters of pairs need {count} keys and one more, and {key_letters} letters make"
            f" {26**key_letters}: use longer keys"
        )
    codes = rng.choice(26**key_letters, size=count + 1, replace=False)
    places = codes[:, None] // 26 ** np.arange(key_letters)[::-1] % 26
    keys = ["".join([LETTERS[i] for i in key]) for key in places.tolist()]
    values = [f"{value:03d}" for value in rng.integers(1000, size=count).tolist()]
    facts = [
        Fact(width * i, width * (i + 1), f"get {key}=", value)
        for i, (key, value) in enumerate(zip(keys, values, strict=False))
    ]
    text = "".join([f"{key}={value};" for key, value in zip(keys, values, strict=False)])
    return Haystack(text, facts, f"get {keys[-1]}=").crop(0, length)


def draw_sentences(rng: np.random.Generator, length: int) -> Haystack:
    """Sentences of the demo's questions, spread over the text, among others that answer nothing.

    Arguments:
    - `length`: characters, of which the last ones may be a part of a sentence.
    """
    every = max(_SENTENCES_OF_A_FACT, -(-length // (_MEAN_SENTENCE * _MOST_FACTS)))
    filler = _filler(rng, length // _SHORTEST_SENTENCE + 1)
    chosen = rng.integers(every, size=len(filler) // every + 1).tolist()
    owners = rng.permutation(len(NAMES) * len(THINGS)).tolist()
    absent = _owned(rng, owners.pop())[1]
    parts: list[str] = []
    facts: list[Fact] = []
    at = 0
    for number, sentence in enumerate(filler):
        if at >= length:
            break
        if number % every == chosen[number // every]:
            sentence, query, answer = _owned(rng, owners.pop())
            facts.append(Fact(at, at + len(sentence), query, answer))
        parts.append(sentence + " ")
        at += len(parts[-1])
    return Haystack("".join(parts), facts, absent).crop(0, length)


def _filler(rng: np.random.Generator, count: int) -> list[str]:
    """Sentences that answer nothing."""
    words = (_KINDS, _SUBJECTS, _VERBS, ("at", "near", "by"), _PLACES)
    columns = [[choices[i] for i in rng.integers(len(choices), size=count).tolist()] for choices in words]
    return [f"The {a} {b} {c} {d} the {e}." for a, b, c, d, e in zip(*columns, strict=True)]


def _owned(rng: np.random.Generator, owner: int) -> tuple[str, str, str]:
    """A sentence about a name and a thing, a question, and its answer."""
    name, thing = NAMES[owner // len(THINGS)], THINGS[owner % len(THINGS)]
    count, color, kind = rng.integers([8, len(COLORS), 2]).tolist()
    sentence = f"{name} has {count + 2} {COLORS[color]} {thing}."
    if kind:
        return sentence, f"How many {thing} does {name} have?", f"{name} has {count + 2} {thing}."
    return sentence, f"What color are the {thing} of {name}?", f"The {thing} are {COLORS[color]}."


LONG_TASKS: dict[str, Callable[[np.random.Generator, int], Haystack]] = {
    "pairs": draw_pairs,
    "sentences": draw_sentences,
}
"""Each draws a text of so many characters."""


def long_stream(
    draw: Callable[[np.random.Generator, int], Haystack], split: Split, rng: np.random.Generator, length: int
) -> Iterator[Haystack]:
    """Endless texts of one split, `length` characters each."""
    while True:
        haystack = draw(rng, length)
        if split_of(Instance("long", haystack.text, "")) == split:
            yield haystack


def is_whole(fact: Fact, chunk_length: int) -> bool:
    """Whether a fact lies in one of the chunks that a text is cut into, whose last characters make room for
    the tokens that begin them."""
    return fact.stop < (fact.start // chunk_length + 1) * chunk_length
