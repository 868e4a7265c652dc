"""Parts that are on their way, as the tests count them: who is ready, who goes ahead, and what is held."""

from collections import Counter, deque
from collections.abc import Mapping

from jdllm.serving.demands import Demand, Held, Kind, Part
from tests.serving.scripts import Script, held_rows


class InFlight:
    """Parts in the order of their submission.

    Arguments:
    - `scripts`: of all requests, by id.
    - `done`: how many steps each running request has done.
    - `goes_ahead`: whether requests go ahead.
    """

    def __init__(self, scripts: Mapping[int, Script], done: Mapping[int, int], goes_ahead: bool):
        self._scripts, self._done, self._goes_ahead = scripts, done, goes_ahead
        self._parts = deque[tuple[Part, int]]()

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, part: Part, rows: int) -> None:
        self._parts.append((part, rows))

    def end(self) -> Part:
        """Take out the oldest part."""
        return self._parts.popleft()[0]

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self._parts)

    @property
    def busy(self) -> set[Kind]:
        return {part.kind for part, _ in self._parts}

    def ready(self) -> dict[int, Demand]:
        flying = {request for part, _ in self._parts for request in part.ids}
        return {r: self._scripts[r].next(n) for r, n in self._done.items() if r not in flying}

    def ahead(self) -> dict[int, Demand]:
        """The step behind that in flight of each request that goes ahead: a reuse, behind a single step."""
        parts = [part for part, _ in self._parts if part.kind in (Kind.REFRESH, Kind.REUSE)]
        kinds = [part.kind for part in parts]
        if not self._goes_ahead or len(set(kinds)) < len(kinds) or any(part.steps > 1 for part in parts):
            return {}
        parts_of, found = Counter(request for part in parts for request in part.ids), {}
        for request, count in parts_of.items():
            done = self._done.get(request)
            later = () if done is None or count > 1 else self._scripts[request].steps[done + 1 :]
            if done is not None and later and later[0].kind is Kind.REUSE:
                found[request] = self._scripts[request].next(done + 1)
        return found

    def held(self) -> Held | None:
        """The request whose refresh has begun, and of which a part is left that is not submitted."""
        flying = {i for part, _ in self._parts if part.kind is Kind.LAYERS for i in part.ids}
        found = [
            Held(request, held_rows(self._scripts[request].steps[done]))
            for request, done in self._done.items()
            if self._scripts[request].in_layers(done + (request in flying))
        ]
        assert len(found) <= 1, found
        return found[0] if found else None
