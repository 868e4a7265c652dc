"""Schedulers whose requests want the same in every plan."""

import dataclasses
from collections.abc import Collection

from jdllm.serving.demands import Demand, Held, Kind, Life, Limits
from jdllm.serving.scheduler import Scheduler

FULL, REFRESH, REUSE, ADAPTIVE, STAGE, PREFILL, DECODE, LAYERED, LAYERS, STORE, SPECULATE, VERIFY, *_ = Kind
LIMITS = Limits(
    max_num_batched_tokens=100,
    max_num_seqs=8,
    max_num_logits=60,
    entries=20,
    reuse_rows=100,
    pages=50,
    longest=150,
    longest_refresh=140,
    beside_pool=130,
    whole_rows=100,
)


def full(rows: int, head_rows: int = 1) -> Demand:
    return Demand(FULL, rows, head_rows, 0)


def refresh(rows: int, head_rows: int = 1) -> Demand:
    return Demand(REFRESH, rows, head_rows, 0)


def reuse(rows: int, head_rows: int = 1, entries: int = 1) -> Demand:
    return Demand(REUSE, rows, head_rows, entries)


def adaptive(rows: int) -> Demand:
    return Demand(ADAPTIVE, rows, 1, 0)


def prepare(rows: int) -> Demand:
    return Demand(STAGE, rows, 0, 0)


def layers(rows: int) -> Demand:
    return Demand(LAYERS, rows, 1, 0)


def with_lives(*lives: Life, limits: Limits = LIMITS, call: int | None = None) -> Scheduler:
    """Requests 0, 1, ... wait, each a call of its own unless all are of one."""
    scheduler = Scheduler(limits)
    for request, life in enumerate(lives):
        scheduler.add(request, life, call)
    return scheduler


class Plans:
    """Requests 0, 1, ... run and want `demands`; each holds a page unless it is a whole sequence."""

    def __init__(self, *demands: Demand, limits: Limits = LIMITS):
        limits = dataclasses.replace(limits, max_num_seqs=max(limits.max_num_seqs, len(demands)))
        lives = [Life(1, int(demand.kind not in (FULL, ADAPTIVE))) for demand in demands]
        self.scheduler = with_lives(*lives, limits=limits)
        self.scheduler.admit()
        self.ready = dict(enumerate(demands))

    def plan(
        self, busy: Collection[Kind] = (), rows: int = 0, held: Held | None = None
    ) -> dict[Kind, tuple[int, ...]]:
        """The parts of a plan, which end at once; they take a second for each row."""
        parts = self.scheduler.plan(self.ready, busy, rows, held)
        for part in parts:
            self.scheduler.charge(part, sum(self.ready[request].rows for request in part.ids))
        return {part.kind: part.ids for part in parts}
