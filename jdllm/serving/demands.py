"""What the scheduler counts: kinds of parts, what requests take, and what the engine has room for."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jdllm.errors import ConfigError


class Kind(enum.IntEnum):
    """What a part of an iteration runs; each kind is an executable of its own."""

    FULL = 0
    """Whole sequences, nothing stored."""
    REFRESH = 1
    """Whole sequences, whose keys and values are stored."""
    REUSE = 2
    """Only the forwarded positions, against stored keys and values."""
    ADAPTIVE = 3
    """A draft and its verification."""
    STAGE = 4
    """A stage of one long context, before its answer is denoised or between two blocks of it."""
    PREFILL = 5
    """Parts of prompts of a causal model, which are stored."""
    DECODE = 6
    """The last token of each sequence of a causal model, against stored keys and values."""
    LAYERED = 7
    """Some layers of one sequence of a causal model, or its last token; its keys do not fit the pool."""
    LAYERS = 8
    """Some layers of one long refresh, whose hidden rows stay on the device until the next ones."""
    STORE = 9
    """Finished blocks of a block model whose other requests have a `PREFILL`; they are stored."""
    SPECULATE = 10
    """A block of each request: its draft, and the verification, which is stored."""
    VERIFY = 11
    """A block of each request: its draft, and a verification where it seems worth it; nothing is stored."""
    ADAPTIVE_REFRESH = 12
    """A `REFRESH` whose step is a draft and its verification."""
    ADAPTIVE_REUSE = 13
    """A `REUSE` whose step is a draft and its verification."""


SUBMITTED = (
    Kind.REUSE,
    Kind.DECODE,
    Kind.ADAPTIVE_REUSE,
    Kind.REFRESH,
    Kind.ADAPTIVE_REFRESH,
    Kind.FULL,
    Kind.ADAPTIVE,
    Kind.STAGE,
    Kind.SPECULATE,
    Kind.VERIFY,
    Kind.STORE,
    Kind.PREFILL,
    Kind.LAYERED,
    Kind.LAYERS,
)
"""The order of the parts of an iteration: the host prepares the next reuse while the others run."""

CHEAP = (Kind.REUSE, Kind.DECODE)
"""Kinds of parts that read what is stored and evaluate few rows."""


COMPANY_ROWS = 2048
"""Rows from which on whole sequences are about as quick in turn as together."""

CUT = 2
"""Where clients share the engine, a refresh of more than so many times `company_rows` rows is cut by
layers."""

CALL_SHARE = 7 / 8
"""The share of places, pages and other room that one call has at most where clients share the engine."""

PART_SECONDS = 0.5
"""Seconds that a part of several steps takes at most, about, where clients share the engine.

At 1.5 requests a second on an H100 the simulated mean latency is 12.1 s without a bound, 12.2 s with this one
and 13.7 s with half of it: who joins in the middle of others' blocks stays out of step with them.
"""


HOST_SECONDS = 3e-3
"""Seconds from the end of a part until the next one begins, about, where the host waits for its results.

On an H200 under 1.5 requests a second they were 3.6 ms: 2.2 to take results in, 1.2 to pack, 0.2 to launch.
"""


class Life(NamedTuple):
    """What a request needs at most, over its whole life.

    - `rows`: packed rows of its largest step.
    - `pages`: pages of the KV pool, 0 without a cache.
    - `holds`: without pages, whether memory elsewhere is held for it from step to step.
    - `alone`: whether this memory is the pool's room, which nobody else has meanwhile.
    """

    rows: int
    pages: int
    holds: bool = False
    alone: bool = False


class Demand(NamedTuple):
    """What the next step of a request takes.

    - `kind`: the executable that runs it.
    - `rows`: packed rows.
    - `head_rows`: rows that meet the head.
    - `entries`: entries of the page table, 0 for what reads nothing that is stored.
    - `steps`: steps of this kind that the request does before another kind is due.
    - `ahead`: whether the step behind this one can be packed before this one has ended.
    - `stores`: whether a step that reuses stores finished blocks too, for which a part has one step.
    - `verified`: rows whose keys a verifier holds beside the pool, where they may be more than `rows`.
    """

    kind: Kind
    rows: int
    head_rows: int
    entries: int
    steps: int = 1
    ahead: bool = False
    stores: bool = False
    verified: int = 0


class Held(NamedTuple):
    """What stays on the device for a request between two of its parts: hidden rows of a refresh.

    - `rows`: by how many rows parts of others are smaller meanwhile, at least.
    """

    request: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the engine has room for.

    - `max_num_batched_tokens`: packed rows of one iteration, all its parts together; also the rows whose keys
      a verifier holds for one part.
    - `max_num_seqs`: requests of one part, hence also running requests with pages, running ones that hold
      other memory, and running ones of one call that hold none.
    - `max_num_logits`: head rows of one part.
    - `entries`: page table entries of one part.
    - `reuse_rows`: packed rows of one part that reuses, of either kind.
    - `pages`: pages that requests may hold in all, the scratch page excluded.
    - `longest`: packed rows of a request that runs alone, at least `max_num_batched_tokens`;
      `longest_refresh` of one with pages.
    - `beside_pool`: packed rows up to which a request without pages runs while others hold some; a longer one
      takes the room of the pool.
    - `whole_rows`: packed rows of one part of whole sequences, but for refreshes without a verifier;
      a longer one is alone in its part.
    - `sizes`: of kinds whose parts fill executables, the rows of these, in rising order.
    - `company_rows`: packed rows of one part of whole sequences where several calls run, who wait for each of
      these parts. One request may have more.
    - `shared`: whether clients share the engine, as those of a server do. Then a call leaves room to others,
      and parts are short (`CALL_SHARE`, `PART_SECONDS`).
    - `in_step`: whether other processes have to decide the same, so that no clock may: turns count rows.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_logits: int
    entries: int
    reuse_rows: int
    pages: int
    longest: int
    longest_refresh: int
    beside_pool: int
    whole_rows: int
    sizes: Mapping[Kind, Sequence[int]] = dataclasses.field(default_factory=dict)
    company_rows: int = COMPANY_ROWS
    shared: bool = False
    in_step: bool = False

    def check_alone(self) -> None:
        """Raise `ConfigError` where other processes have to decide the same: requests may not come at times
        that these do not know."""
        if self.in_step:
            raise ConfigError(
                "devices are those of several processes, which only LLM and the commands with --coordinator"
                " run in step: serve the model on the devices of one machine"
            )


class Part(NamedTuple):
    """Requests that one executable serves together.

    - `ids`: in the order of their arrival.
    - `steps`: that the executable does at most before others have to be served.
    """

    kind: Kind
    ids: tuple[int, ...]
    steps: int = 1
