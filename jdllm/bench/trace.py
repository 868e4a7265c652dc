"""A trace: when requests arrived at a server, and how long they were, to be replayed."""

from pathlib import Path
from typing import Any, NamedTuple

from jdllm.arguments import shortened
from jdllm.bench.workload import checked_length
from jdllm.errors import RequestError
from jdllm.json_files import numbered_lines, parse_object

LATEST = 7 * 24 * 3600
"""Seconds of a trace at most. More are a mistake in the unit, or the time of day."""

_FIELDS = ("at", "prompt_tokens", "gen_length")


class Arrival(NamedTuple):
    """One request of a trace.

    - `line`: its line in the file.
    - `at`: seconds from the start of the load.
    - `prompt_tokens`: of its prompt.
    - `gen_length`: tokens that it generates, `None` for as many as the load says.
    """

    line: int
    at: float
    prompt_tokens: int
    gen_length: int | None


class Trace(NamedTuple):
    """The requests of a file, in the order of their arrivals.

    - `path`: the file.
    - `arrivals`: at least one.
    """

    path: Path
    arrivals: tuple[Arrival, ...]

    @property
    def times(self) -> list[float]:
        """Seconds from the start of the load at which requests arrive, in order."""
        return [arrival.at for arrival in self.arrivals]

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [arrival.prompt_tokens for arrival in self.arrivals]

    def gen_lengths(self, otherwise: int) -> list[int]:
        """Tokens that each request generates: `otherwise` where its line does not say."""
        return [arrival.gen_length or otherwise for arrival in self.arrivals]

    @property
    def shared_gen_length(self) -> int | None:
        """The tokens that every line asks for; `None` where lines differ, or do not say."""
        asked = {arrival.gen_length for arrival in self.arrivals}
        return asked.pop() if len(asked) == 1 else None

    def check_steps(self, steps: int, gen_length: int) -> None:
        """Raise `RequestError` for a request that gets no whole number of steps.

        Arguments:
        - `steps`: denoising steps of a request that generates `gen_length` tokens. A request of another
          length takes its steps in proportion.
        - `gen_length`: tokens of a request whose line does not say.
        """
        for arrival, length in zip(self.arrivals, self.gen_lengths(gen_length), strict=True):
            if steps * length % gen_length:
                raise RequestError(
                    f"{self.path}, line {arrival.line}: 'gen_length' is {length}, which takes no whole number"
                    f" of steps where {gen_length} tokens take {steps}"
                )


def read_trace(path: Path) -> Trace:
    """Read a file of JSON lines, `{"at": 1.5, "prompt_tokens": 100, "gen_length": 32}` each.

    Arguments:
    - `path`: the file, UTF-8; blank lines are passed over. `gen_length` may be left out. No line is earlier
      than the line before.

    Raises `RequestError`, naming file and line, for anything else.
    """
    arrivals: list[Arrival] = []
    for number, text in numbered_lines(path, RequestError):
        where = f"{path}, line {number}"
        arrival = _arrival(number, parse_object(text, Path(where), RequestError), where)
        if arrivals and arrival.at < arrivals[-1].at:
            raise RequestError(
                f"{where}: 'at' is {arrival.at:g}, earlier than {arrivals[-1].at:g} of line"
                f" {arrivals[-1].line}: sort the lines by their arrivals"
            )
        arrivals.append(arrival)
    if not arrivals:
        raise RequestError(f'{path} has no line, expected such as {{"at": 1.5, "prompt_tokens": 100}}')
    return Trace(path, tuple(arrivals))


def _arrival(line: int, values: dict[str, Any], where: str) -> Arrival:
    unknown = sorted(values.keys() - set(_FIELDS))
    if unknown:
        raise RequestError(f"{where} has a field {unknown[0]!r}, expected {', '.join(map(repr, _FIELDS))}")
    gen_length = values.get("gen_length")
    return Arrival(
        line,
        _seconds(f"{where}: 'at'", values.get("at")),
        checked_length(f"{where}: 'prompt_tokens'", values.get("prompt_tokens")),
        None if gen_length is None else checked_length(f"{where}: 'gen_length'", gen_length),
    )


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LATEST:
        raise RequestError(
            f"{name} is {shortened(value)}, expected seconds from the start of the load, 0 to {LATEST}"
        )
    return float(value)
