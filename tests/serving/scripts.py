"""What random requests take of a scheduler, step by step, and random limits."""

import itertools
from typing import NamedTuple

from hypothesis import strategies as st

from jdllm.serving.demands import Demand, Kind, Life, Limits

PAGE_ROWS = 4


class Script(NamedTuple):
    """A request: its life, its steps from the first to the last, a number of its call, and its priority."""

    life: Life
    steps: tuple[Demand, ...]
    call: int = 0
    priority: int = 0

    def next(self, done: int) -> Demand:
        """The step after so many, and how many of its kind there are."""
        demand, *later = self.steps[done:]
        if demand.kind is Kind.LAYERS:
            return demand
        return demand._replace(steps=1 + sum(1 for _ in itertools.takewhile(demand.__eq__, later)))

    def in_layers(self, done: int) -> bool:
        """Whether some but not all layers of a refresh have run after so many steps."""
        kinds = [step.kind for step in self.steps[max(done - 1, 0) : done + 1]]
        return done > 0 and kinds == [Kind.LAYERS, Kind.LAYERS]


def held_rows(demand: Demand) -> int:
    """By how many rows other parts are smaller between two parts of a refresh that is cut."""
    return -(-demand.rows // 3)


def uncached(kind: Kind, rows: int, head_rows: int, steps: int) -> Script:
    life = Life(rows, 0, holds=kind is Kind.ADAPTIVE)
    return Script(life, (Demand(kind, rows, min(head_rows, rows), 0),) * steps)


def cached(rows: int, head_rows: int, window: int, reuses: list[int]) -> Script:
    """A block is a refresh and some reuses."""
    pages, window = -(-rows // PAGE_ROWS), min(window, rows)
    refresh = Demand(Kind.REFRESH, rows, min(head_rows, rows), 0)
    reuse = Demand(Kind.REUSE, window, min(head_rows, window), pages)
    return Script(Life(rows, pages), tuple(step for n in reuses for step in (refresh, *(reuse,) * n)))


def verified(rows: int, head_rows: int, window: int, reuses: list[int]) -> Script:
    """A block is a refresh and some reuses, of which a verifier holds whole sequences."""
    pages, window = -(-rows // PAGE_ROWS), min(window, rows)
    refresh = Demand(Kind.ADAPTIVE_REFRESH, rows, min(head_rows, rows), 0)
    reuse = Demand(Kind.ADAPTIVE_REUSE, window, min(head_rows, window), pages, verified=rows)
    return Script(Life(rows, pages), tuple(step for n in reuses for step in (refresh, *(reuse,) * n)))


def cut(rows: int, head_rows: int, window: int, parts: int, reuses: list[int]) -> Script:
    """A block is a refresh in some parts, and some reuses."""
    pages, window = -(-rows // PAGE_ROWS), min(window, rows)
    layers = Demand(Kind.LAYERS, rows, min(head_rows, rows), 0)
    reuse = Demand(Kind.REUSE, window, min(head_rows, window), pages)
    return Script(
        Life(rows, pages), tuple(step for n in reuses for step in (*(layers,) * parts, *(reuse,) * n))
    )


def prepared(rows: int, window: int, stages: int, reuses: list[int]) -> Script:
    """A block is some stages of preparation and some reuses."""
    pages, window = -(-rows // PAGE_ROWS), min(window, rows)
    stage, reuse = Demand(Kind.STAGE, rows, 0, 0), Demand(Kind.REUSE, window, window, pages)
    return Script(
        Life(rows, pages), tuple(step for n in reuses for step in (*(stage,) * stages, *(reuse,) * n))
    )


def generated(prompt: int, chunk: int, tokens: int) -> Script:
    """A prompt in parts, then a row a token."""
    pages, chunks = -(-(prompt + tokens) // PAGE_ROWS), [*[chunk] * (prompt // chunk), prompt % chunk]
    parts = [
        Demand(Kind.PREFILL, rows, int(i == len(chunks) - 1), pages) for i, rows in enumerate(chunks) if rows
    ]
    return Script(Life(min(prompt, chunk), pages), (*parts, *[Demand(Kind.DECODE, 1, 1, pages)] * tokens))


def layered(rows: int, window: int, parts: int, reuses: list[int]) -> Script:
    """A block is a refresh in some parts, and some reuses, in the room of the pool."""
    refresh, reuse = (Demand(Kind.LAYERED, n, min(window, rows), 0) for n in (rows, min(window, rows)))
    steps = tuple(step for n in reuses for step in (*(refresh,) * parts, *(reuse,) * n))
    return Script(Life(rows, 0, holds=True, alone=True), steps)


@st.composite
def some_limits(draw: st.DrawFn) -> Limits:
    ends = ((8, 48), (1, 12), (1, 40), (1, 16), (1, 30), (2, 24), (0, 24), (0, 24), (0, 24))
    budget, seqs, logits, entries, reuses, pages, *beyond = draw(
        st.tuples(*(st.integers(*end) for end in ends))
    )
    beside, refresh, longest = (budget + n for n in sorted(beyond))
    rows = draw(st.sampled_from([(), (4, 8, 16, 32)]))
    sizes: dict[Kind, tuple[int, ...]] = {Kind.REFRESH: rows, Kind.PREFILL: rows} if rows else {}
    whole = draw(st.integers(min(8, budget), budget))
    limits = budget, seqs, logits, entries, reuses, pages, longest, refresh, beside, whole
    return Limits(*limits, sizes, company_rows=draw(st.integers(1, 40)), shared=draw(st.booleans()))


ROWS = st.integers(1, 16) | st.integers(1, 60)
SCRIPTS = st.one_of(
    st.builds(uncached, st.sampled_from([Kind.FULL, Kind.ADAPTIVE]), ROWS, ROWS, st.integers(1, 12)),
    st.builds(cached, ROWS, ROWS, st.integers(1, 12), st.lists(st.integers(0, 4), min_size=1, max_size=4)),
    st.builds(verified, ROWS, ROWS, st.integers(1, 12), st.lists(st.integers(0, 4), min_size=1, max_size=4)),
    st.builds(
        cut,
        ROWS,
        ROWS,
        st.integers(1, 12),
        st.integers(2, 4),
        st.lists(st.integers(1, 3), min_size=1, max_size=3),
    ),
    st.builds(
        prepared,
        ROWS,
        st.integers(1, 12),
        st.integers(1, 3),
        st.lists(st.integers(0, 4), min_size=1, max_size=2),
    ),
    st.builds(
        layered,
        ROWS,
        st.integers(1, 12),
        st.integers(1, 3),
        st.lists(st.integers(0, 4), min_size=1, max_size=2),
    ),
    st.builds(generated, ROWS, st.integers(1, 16), st.integers(1, 6)),
)
