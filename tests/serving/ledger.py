"""What calls have had of the device, as the tests count it."""


class Ledger:
    """Calls that run, each with one priority.

    - `had`: seconds of each call, as turns count them.
    """

    def __init__(self):
        self.had: dict[int, int] = {}
        self._priority: dict[int, int] = {}
        self._since: dict[int, int] = {}
        self._all_had: dict[int, int] = {}
        self._given = self._longest = 0

    def __contains__(self, call: int) -> bool:
        return call in self._priority

    def __len__(self) -> int:
        return len(self._priority)

    def begin(self, call: int, priority: int) -> None:
        """A call that comes has had less than all before it, by the longest part."""
        if priority not in self._priority.values():
            self._all_had[priority] = 0
        self.had[call], self._since[call] = self._all_had[priority] - self._longest, self._given
        self._priority[call] = priority

    def end(self, call: int) -> None:
        del self._priority[call]

    def overdue(self, call: int) -> bool:
        return self._given - self._since[call] > 4 * len(self) * self._longest

    def place(self, call: int) -> tuple[bool, int]:
        return not self.overdue(call), self._since[call] if self.overdue(call) else self.had[call]

    def goes_first(self, call: int) -> bool:
        """Whether others may wait for a call without pages."""
        highest = min(self._priority.values())
        has_least = self._priority[call] == highest and self.had[call] == self._least(highest)
        return has_least or self.overdue(call)

    def charge(self, seconds: dict[int, int]) -> None:
        """Count what the calls of a part had."""
        total = sum(seconds.values())
        self._given, self._longest = self._given + total, max(self._longest, total)
        most = {call: self._least(self._priority[call]) + 2 * self._longest for call in seconds}
        for call, more in seconds.items():
            self.had[call], self._since[call] = min(self.had[call] + more, most[call]), self._given
        for priority in self._priority.values():
            self._all_had[priority] = max(self._all_had[priority], self._least(priority))

    def _least(self, priority: int) -> int:
        return min(self.had[call] for call, one in self._priority.items() if one == priority)
