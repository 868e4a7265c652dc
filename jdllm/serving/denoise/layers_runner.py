"""Runs long refreshes some layers at a time: other parts run in between."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdllm.compiling.executables import Executable, Program
from jdllm.decoding.cached import last_layers, some_layers
from jdllm.decoding.encoded_trace import EncodedTrace, encoding
from jdllm.execution.transformer import embed
from jdllm.models.leaf import dtypes_of
from jdllm.models.weights import layer_runs
from jdllm.planning.account import Account
from jdllm.planning.ladder import Entry
from jdllm.serving.demands import CUT, Held
from jdllm.serving.denoise.cached_packing import RefreshBatch, pack_refresh
from jdllm.serving.denoise.cached_runner import LEVELS, is_usual, step_static
from jdllm.serving.launch import Launch
from jdllm.serving.on_device import OnDevice
from jdllm.serving.packing import demand, smallest_request
from jdllm.serving.request import Request

_last_layers = encoding(last_layers)


class _Size(NamedTuple):
    """A compiled size of refreshes that are cut.

    - `entry`: of the ladder.
    - `first`, `some`, `last`: make hidden rows of tokens, run `count` layers, and run the last layers.
    - `held_rows`: of `Held`.
    """

    entry: Entry
    count: int
    first: Executable
    some: Executable
    last: Executable
    held_rows: int


@dataclasses.dataclass
class _Begun:
    """A refresh of which some layers have run.

    - `layers`: how many were submitted.
    - `hidden`: the rows behind these; on the host while they are set aside, `None` before the first layer.
      Only the thread of the parts reads and writes them.
    """

    request: int
    size: _Size
    batch: RefreshBatch
    layers: int = 0
    hidden: jax.Array | np.ndarray | None = None


class LayersRunner:
    """Runs long refreshes of the usual form, where a warm-up has compiled their sizes.

    A part has at most as many rows times layers as a refresh of `company_rows` rows, or one layer. The hidden
    rows of one request stay on the device from part to part. Nobody reads the request's pages before the last
    part, so its tokens are those of a whole refresh.

    Arguments:
    - `model`: the model on its device. Where its layers are not all alike and there, nothing is cut.
    - `entries`: of the ladder's usual refreshes.
    - `company_rows`: of `Limits`.
    """

    def __init__(self, model: OnDevice, entries: Sequence[Entry], company_rows: int):
        self._model = model
        self._refreshes = entries
        self._company_rows = company_rows
        self._sizes: list[_Size] = []
        self._begun: _Begun | None = None

    def programs(self) -> Iterator[Program]:
        """What the sizes above the bound need compiled."""
        for entry in self._entries():
            yield from self._programs(entry)

    def warm(self) -> None:
        """Compile all sizes above the bound. A size is not used where it does not fit beside the pool, or
        where no other refresh fits beside its hidden rows: then its refreshes are whole."""
        self._model.executables.prepare(list(self.programs()))
        sizes = (self._compiled(entry) for entry in self._entries())
        self._sizes = [size for size in sizes if size is not None]

    def takes(self, request: Request, rows: int, head_rows: int) -> bool:
        """Whether the next refresh of a request, of so many packed rows and head rows, is cut."""
        return self._size(request, rows, head_rows) is not None

    def holding(self) -> Held | None:
        """Whose hidden rows are on the device; `None` where nobody's are."""
        begun = self._begun
        return None if begun is None else Held(begun.request, begun.size.held_rows)

    def launch(self, requests: list[Request], max_steps: int) -> Launch:
        """Pack the next layers of one refresh; `max_steps` does not matter."""
        (request,) = requests
        if self._begun is None:
            self._begun = self._begin(request)
        begun = self._begun
        assert begun.request == request.id, (begun.request, request.id)
        first, begun.layers = begun.layers, begun.layers + begun.size.count
        rows = begun.size.entry.rows
        if begun.layers >= self._model.config.num_layers:
            batch, run = begun.batch, functools.partial(self._run_last, begun)
            return Launch(run, batch.packed.candidates, batch.stored, rows=rows, quick=True)
        nothing, run = [np.zeros(0, np.int32)], functools.partial(self._run_some, begun, first)
        return Launch(run, nothing, [None], lambda _: 0, rows, quick=True)

    @property
    def held(self) -> int:
        """For how many requests something is held."""
        return int(self._begun is not None)

    def forget(self, request: int) -> None:
        """Give up the hidden rows of a request: it has ended, or begins again."""
        if self._begun is not None and self._begun.request == request:
            self._begun = None

    def clear(self) -> None:
        """Give up all hidden rows: a failed part may have damaged them. Their refresh begins again."""
        self._begun = None

    def set_aside(self) -> None:
        """Take the hidden rows off the device until the next layers run."""
        begun = self._begun
        if begun is not None and begun.hidden is not None:
            begun.hidden = np.array(begun.hidden)  # a view would keep the rows where they are

    def _begin(self, request: Request) -> _Begun:
        size = self._size(request, *demand(request))
        assert size is not None
        batch = pack_refresh([request], self._model.config, self._model.pool.book, size.entry)
        return _Begun(request.id, size, batch)

    def _run_some(self, begun: _Begun, first: int) -> jax.Array:
        size, batch = begun.size, begun.batch.packed.batch
        if begun.hidden is None:
            begun.hidden = size.first(self._model.params, batch.tokens)
        arguments = jnp.asarray(begun.hidden), batch.rows, begun.batch.selection, begun.batch.table
        begun.hidden, done = self._model.pool.run(
            size.some, self._model.params, *arguments, np.int32(first), writes=True
        )
        return done

    def _run_last(self, begun: _Begun) -> EncodedTrace:
        batch, selection, table, _ = begun.batch
        assert begun.hidden is not None
        arguments = self._model.params, batch.batch, selection, table, jnp.asarray(begun.hidden)
        trace = self._model.pool.run(begun.size.last, *arguments, writes=True)
        if self._begun is begun:
            self._begun = None
        return trace

    def _size(self, request: Request, rows: int, head_rows: int) -> _Size | None:
        if rows <= CUT * self._company_rows or not is_usual(request):
            return None
        return next((size for size in self._sizes if size.entry.holds(rows, head_rows, 1)), None)

    def _entries(self) -> list[Entry]:
        """The sizes that are cut: those that a refresh of one part may not have."""
        model = self._model
        if not model.account.max_refresh or model.config.offloaded or len(layer_runs(model.config)) > 1:
            return []
        most = CUT * self._company_rows
        return [entry for entry in self._refreshes if entry.rows > most and self._count(entry)]

    def _count(self, entry: Entry) -> int:
        """Layers of a part; 0 where a part would have all."""
        layers = self._model.config.num_layers
        count = max(1, self._company_rows * layers // entry.rows)
        return count if count < layers else 0

    def _programs(self, entry: Entry) -> Iterator[Program]:
        """What makes the first hidden rows, what runs some layers, and what runs the last ones."""
        params, config, _, account, pool = self._model
        request, pages = smallest_request(config), pool.book.allocate(-1, 2)
        request.id = -1
        (batch, _), selection, table, _ = pack_refresh([request], config, pages, entry)
        hidden, count = self._hidden(entry), self._count(entry)
        name = f"refresh of {entry.rows} rows by layers"
        yield Program(embed, (params, batch.tokens), {}, name=name)
        arguments = params, hidden, batch.rows, selection, table, np.int32(0), pool.abstract
        donated = ("hidden", "pool")
        yield Program(some_layers, arguments, {"config": config, "count": count}, donated, name=name)
        last = config.num_layers - (-(-config.num_layers // count) - 1) * count
        static = step_static(config, account, entry, LEVELS[0]) | {"count": last}
        arguments = params, batch, selection, table, hidden, pool.abstract
        yield Program(_last_layers, arguments, static, donate=("pool",), name=name)

    def _compiled(self, entry: Entry) -> _Size | None:
        """The executables of a size, `None` where there is no room for them."""
        account, hidden = self._model.account, self._hidden(entry)
        size = hidden.size * hidden.dtype.itemsize
        first, some, last = map(self._model.executables.get, self._programs(entry))
        room, held_rows = account.step_room(entry.rows), _held_rows(account, self._refreshes, size)
        needed = size + max(sum(executable.needs) for executable in (some, last))
        if held_rows is None or (room is not None and needed > room.device):
            return None
        return _Size(entry, self._count(entry), first, some, last, held_rows)

    def _hidden(self, entry: Entry) -> jax.ShapeDtypeStruct:
        dtype = dtypes_of(self._model.params).activations
        return jax.ShapeDtypeStruct((entry.rows, self._model.config.hidden_size), dtype)


def _held_rows(account: Account, entries: Sequence[Entry], held: int) -> int | None:
    """By how many rows parts are smaller beside so many bytes: `None` where none has room.

    The account has room for the largest step, with a margin for what is compiled. Part of a step does not
    depend on its rows, so fewer rows save less than their share of the largest step. The plan of each size
    tells whether the size leaves room.
    """
    if account.sharing is None:
        return 0
    needs, most = account.sharing.needs, account.steps["refresh"]
    fitting = [entry.rows for entry in entries if needs.whole(entry.rows) + held <= most]
    return max(0, account.rows - fitting[-1]) if fitting else None
