"""How long steps take, as parts before have shown."""

from jdllm.serving.demands import Kind


class Pace:
    """Seconds of a step, for each kind and for sizes a factor of two apart: those of the last such part."""

    def __init__(self):
        self._seconds: dict[tuple[Kind, int], float] = {}

    def learn(self, kind: Kind, rows: int, seconds: float, *, woke: bool = False) -> None:
        """Take in how long a step of a kind and of so many packed rows took.

        Arguments:
        - `woke`: whether its time holds that of its launch too. Then it counts only where no other is known.
        """
        if not woke or (kind, rows.bit_length()) not in self._seconds:
            self._seconds[kind, rows.bit_length()] = seconds

    def takes(self, kind: Kind, rows: int, seconds: float) -> bool:
        """Whether a step is known to take `seconds` at least."""
        return self._seconds.get((kind, rows.bit_length()), 0.0) >= seconds

    def steps(self, kind: Kind, rows: int, seconds: float) -> int:
        """How many steps take `seconds` at most: at least one, and one where no such step is known."""
        known = self._seconds.get((kind, rows.bit_length())) or seconds
        return max(1, int(seconds / known))
