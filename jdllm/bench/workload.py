"""What is asked of a server and when: lengths, prompts and arrivals, all drawn from one seed."""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jdllm.arguments import positive, shortened
from jdllm.decoding.registry import RULES
from jdllm.errors import RequestError
from jdllm.json_files import read_object

if TYPE_CHECKING:
    from numpy.random import Generator

Lengths = Callable[["Generator", int], list[int]]
"""Draws so many lengths."""

LONGEST = 2**24
"""Tokens of a prompt at most."""

_LENGTHS, _PROMPTS, _ARRIVALS = range(3)
"""Streams of random numbers: what one of them draws does not depend on the others."""

_STEPPED = ("steps", "block_length")


class FileWorkload(NamedTuple):
    """What a file says of a workload.

    - `lengths`: of the prompts, cycled; `count` of them.
    - `gen_length`: tokens to generate, where the file says so.
    - `sampling`: `steps` and `block_length`, where it says so.
    """

    lengths: Lengths
    count: int
    gen_length: int | None
    sampling: dict[str, int]


def read_workload(path: Path) -> FileWorkload:
    """Read `{"prompt_lengths": [...]}`, which may have `gen_length`, `steps` and `block_length` too.

    Raises `RequestError` for anything else; it names the file.
    """
    values = read_object(path, RequestError)
    lengths = values.get("prompt_lengths")
    if not isinstance(lengths, list) or not lengths:
        raise RequestError(f"{path} has no list 'prompt_lengths'")
    for i, length in enumerate(lengths):
        checked_length(f"prompt_lengths[{i}] of {path}", length)
    numbers = {
        name: positive(f"'{name}' of {path}", values[name], RequestError)
        for name in ("gen_length", *_STEPPED)
        if name in values
    }
    gen_length = numbers.pop("gen_length", None)
    return FileWorkload(cycled(lengths), len(lengths), gen_length, numbers)


def parse_lengths(text: str) -> Lengths:
    """Lengths from an option.

    Arguments:
    - `text`: `512` for always the same; `100:1000` for whole numbers between these, both included, all
      equally likely; `lognormal:MEAN:SIGMA` for a log-normal distribution of this mean, whose logarithm has
      the standard deviation SIGMA. No length is below 1.

    Raises `RequestError` for anything else.
    """
    match text.split(":"):
        case [length] if _is_length(length):
            return cycled([int(length)])
        case [least, most] if _is_length(least) and _is_length(most) and int(least) <= int(most):
            return lambda rng, count: rng.integers(int(least), int(most) + 1, count).tolist()
        case ["lognormal", mean, sigma] if _number(mean) >= 1 and _number(sigma) >= 0:
            return _lognormal(_number(mean), _number(sigma))
    raise RequestError(
        f"--prompt-length is {text!r}, expected such as 512, 100:1000 or lognormal:MEAN:SIGMA"
        f" (1 to {LONGEST} tokens)"
    )


def draw_prompts(
    lengths: Lengths, count: int, vocab_size: int, avoided: frozenset[int], seed: int
) -> list[list[int]]:
    """Prompts of random ids of the lower half of a vocabulary, where ids of texts are.

    Arguments:
    - `lengths`, `count`: how long, and how many.
    - `vocab_size`: of the tokenizer.
    - `avoided`: ids that have a meaning, such as the mask.
    - `seed`: the first prompts are the same, however many follow.

    Raises `RequestError` where no id is left.
    """
    import numpy as np

    ids = np.array([i for i in range(vocab_size // 2) if i not in avoided])
    if not ids.size:
        raise RequestError(f"a vocabulary of {vocab_size} ids has none that prompts could be made of")
    drawn = lengths(_rng(seed, _LENGTHS), count)
    rng = _rng(seed, _PROMPTS)
    return [ids[rng.integers(len(ids), size=length)].tolist() for length in drawn]


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which requests arrive that come independently of each other, `rate` a second."""
    import numpy as np

    return np.cumsum(_rng(seed, _ARRIVALS).exponential(1 / rate, count)).tolist()


def steps_of(sampling: Mapping[str, Any]) -> int | None:
    """Forward evaluations that a whole generation has, where the fields of its request say that."""
    chosen = [RULES.get((field, sampling.get(field, ""))) for field in ("transfer", "alg")]
    if any(rule is not None and not rule.takes_steps for rule in chosen):
        return None
    return sampling.get("steps")


def cycled(lengths: Sequence[int]) -> Lengths:
    """Draws `lengths` in turn, without any chance."""
    return lambda _, count: list(itertools.islice(itertools.cycle(lengths), count))


def checked_length(name: str, value: object) -> int:
    """`value` as a number of tokens, at most `LONGEST`; raises `RequestError`, which begins with `name`."""
    length = positive(name, value, RequestError)
    if length > LONGEST:
        raise RequestError(f"{name} is {shortened(value)}, expected at most {LONGEST}")
    return length


def _rng(seed: int, stream: int) -> "Generator":
    import numpy as np  # takes longer to import than all help texts to print

    return np.random.default_rng([seed, stream])


def _lognormal(mean: float, sigma: float) -> Lengths:
    import numpy as np

    def draw(rng: "Generator", count: int) -> list[int]:
        drawn = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
        return np.clip(np.rint(drawn), 1, LONGEST).astype(int).tolist()

    return draw


def _is_length(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,8}", text) is not None and 1 <= int(text) <= LONGEST


def _number(text: str) -> float:
    """A finite number, or NaN, which no comparison holds for."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) and value <= LONGEST else math.nan
