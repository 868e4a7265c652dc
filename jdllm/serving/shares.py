"""Shares of a service among calls, whose requests share what is given to the call."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple


class Rounds:
    """The order of requests that wait: each round takes one request of each call.

    A clock counts rounds. A call that comes takes part from the present round on, however many requests
    earlier calls have left, and later calls cannot pass it for ever.
    """

    def __init__(self):
        self._clock = 0.0
        self._next: dict[int, float] = {}
        self._left: Counter[int] = Counter()

    def join(self, call: int) -> float:
        """Let one more request of a call wait; returns its round."""
        self._left[call] += 1
        round = max(self._next.get(call, 0.0), self._clock)
        self._next[call] = round + 1
        return round

    def leave(self, call: int, *, served: bool) -> None:
        """Take one request of a call out, which was served or not."""
        self._clock += served / len(self._left)
        self._left[call] -= 1
        if not self._left[call]:
            del self._left[call], self._next[call]

    def put_back(self, call: int, round: float) -> int:
        """By how many whole rounds the requests of a call fall back that others have passed.

        Arguments:
        - `round`: of the first of them, which counts as one that comes now.
        """
        late = max(0, int(self._clock - round))
        self._next[call] += late
        return late


class Caller(NamedTuple):
    """The requests of a call that have one priority; the lowest number is served first."""

    priority: int
    call: int


class Turns:
    """What each caller that runs has had of the device, in seconds.

    Callers of a lower number go before all others. One that comes has had less than all before it, by the
    longest part: a short one may end before long ones go on. Others of its priority can pass a caller only
    until it is overdue: until n callers have had 4 n times the longest part since its last one. Nobody counts
    as more than twice the longest part ahead of the one of its priority that has had least.
    """

    def __init__(self):
        self._longest = self._given = 0.0
        self._had: dict[int, dict[Caller, float]] = {}
        self._all_had: dict[int, float] = {}
        self._since: dict[Caller, float] = {}
        self._requests: Counter[Caller] = Counter()

    def __len__(self) -> int:
        return len(self._since)

    def join(self, caller: Caller) -> None:
        """Let one more request of a caller run."""
        if not self._requests[caller]:
            start = self._all_had.setdefault(caller.priority, 0.0) - self._longest
            self._had.setdefault(caller.priority, {})[caller] = start
            self._since[caller] = self._given
        self._requests[caller] += 1

    def leave(self, caller: Caller) -> None:
        """Take one request of a caller out."""
        self._requests[caller] -= 1
        if self._requests[caller]:
            return
        del self._requests[caller], self._since[caller], self._had[caller.priority][caller]
        if not self._had[caller.priority]:
            del self._had[caller.priority], self._all_had[caller.priority]

    def place(self, caller: Caller) -> tuple[bool, float]:
        """The place of a caller among those of its priority, lowest first."""
        overdue = self._given - self._since[caller] > 4 * len(self) * self._longest
        return not overdue, self._since[caller] if overdue else self._had[caller.priority][caller]

    def is_first(self, caller: Caller) -> bool:
        """Whether a caller is overdue, or nobody has a lower number, or the same and has had less."""
        not_overdue, had = self.place(caller)
        least = min(self._had)
        return not not_overdue or (caller.priority == least and had <= min(self._had[least].values()))

    def charge(self, seconds: Mapping[Caller, float]) -> None:
        """Take in what the callers of a part had of the device, as far as they still run."""
        total = sum(seconds.values())
        self._given += total
        self._longest = max(self._longest, total)
        most = {priority: min(had.values()) + 2 * self._longest for priority, had in self._had.items()}
        for caller, more in seconds.items():
            had, self._since[caller] = self._had[caller.priority], self._given
            had[caller] = min(had[caller] + more, most[caller.priority])
        for priority, had in self._had.items():
            self._all_had[priority] = max(self._all_had[priority], min(had.values()))
