"""Shares of a service among calls, whose requests share what is given to the call."""

from collections import Counter
from collections.abc import Mapping


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
        self._next[call] = max(self._next.get(call, self._clock) + 1, self._clock + 1)
        return self._next[call] - 1

    def leave(self, call: int, *, served: bool) -> None:
        """Take one request of a call out, which was served or not."""
        self._clock += served / len(self._left)
        self._left[call] -= 1
        if not self._left[call]:
            del self._left[call], self._next[call]


class Turns:
    """What each call that runs has had of the device, in seconds.

    A call that comes has had less than all before it, by the longest part: a short one may end before long
    ones go on. Calls that come can pass another only until that one is overdue: until n calls have had 4 n
    times the longest part since its last one. Nobody counts as more than twice the longest part ahead of the
    one that has had least.
    """

    def __init__(self):
        self._longest = self._given = self._all_had = 0.0
        self._had: dict[int, float] = {}
        self._since: dict[int, float] = {}
        self._requests: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._had)

    def join(self, call: int) -> None:
        """Let one more request of a call run."""
        if not self._requests[call]:
            self._had[call], self._since[call] = self._all_had - self._longest, self._given
        self._requests[call] += 1

    def leave(self, call: int) -> None:
        """Take one request of a call out."""
        self._requests[call] -= 1
        if not self._requests[call]:
            del self._requests[call], self._had[call], self._since[call]

    def place(self, call: int) -> tuple[bool, float]:
        """The place of a call in the order of turns, lowest first: the overdue, then who has had least."""
        overdue = self._given - self._since[call] > 4 * len(self) * self._longest
        return not overdue, self._since[call] if overdue else self._had[call]

    def is_first(self, call: int) -> bool:
        """Whether a call is overdue, or no other call has had less."""
        not_overdue, had = self.place(call)
        return not not_overdue or had <= min(self._had.values())

    def charge(self, seconds: Mapping[int, float]) -> None:
        """Take in what the calls of a part had of the device, those that have left included."""
        total = sum(seconds.values())
        self._given += total
        self._longest = max(self._longest, total)
        here = {call: more for call, more in seconds.items() if call in self._had}
        most = min(self._had.values(), default=0.0) + 2 * self._longest
        for call, more in here.items():
            self._since[call], self._had[call] = self._given, min(self._had[call] + more, most)
        self._all_had = max(self._all_had, min(self._had.values(), default=0.0))
