"""Ahead-of-time compiled functions, one for each set of shapes and static arguments."""

import collections
import concurrent.futures
import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jdllm.compiling.executable import (
    Device,
    Executable,
    Lowered,
    Program,
    compiler_options,
    finish,
    from_bytes,
    lower,
    temp_bytes,
    to_bytes,
)
from jdllm.compiling.host_arguments import on_host
from jdllm.compiling.key import memory_kind_of, program_key
from jdllm.compiling.over_cards import mesh_of
from jdllm.compiling.store import ExecutableStore
from jdllm.pallas.device import Kernels, Target, preferring, target

__all__ = ["Executable", "Executables", "Prepared", "Program", "compiler_options", "temp_bytes"]

CAPACITY = 192
"""Executables that are kept in memory: enough for the largest ladder and for the needs of single requests."""

_CACHE_HIT = "/jax/compilation_cache/cache_hits"


class Prepared(NamedTuple):
    """How many executables were compiled and loaded, and the seconds that it took."""

    compiled: int
    loaded: int
    seconds: float


Progress = Callable[[int, Program], None]
"""Takes how many programs are prepared, and the last of them."""


class Executables:
    """Compiles on first use and keeps the executables; several threads may share it.

    Arguments:
    - `platform`: the platform of the arrays that will be passed, for the compiler options.
    - `store`: where executables are kept for other processes; nowhere by default.
    - `capacity`: how many are kept in memory; the least recently used go first.
    - `kernels`: "auto" for any kernel that suits the card, "triton" for kernels in Triton, "xla" for none.

    `compiled` and `loaded` count how many were compiled, and taken from the store.
    """

    def __init__(
        self,
        platform: str,
        store: ExecutableStore | None = None,
        capacity: int = CAPACITY,
        kernels: Kernels = "auto",
    ):
        self.platform = platform
        self.kernels: Kernels = kernels
        self.store = store
        self.capacity = capacity
        self.compiled = self.loaded = 0
        self._kept: collections.OrderedDict[Hashable, Executable] = collections.OrderedDict()
        self._awaited: dict[Hashable, concurrent.futures.Future[Executable]] = {}
        self._lock = threading.Lock()
        self._lowering = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def target(self) -> Target:
        """What functions are traced for."""
        with preferring(self.kernels):
            return target(self.platform)

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        donate: tuple[str, ...] = (),
        tuned: bool = True,
        **static: Any,
    ) -> Any:
        """`function(*args, **static)` by the executable for the shapes of `args` and for `static`.

        The arguments with the names `donate` give their memory to results, and cannot be used again. `tuned`
        says whether matrix products are tried on the device while the executable is compiled.
        """
        return self.compile(function, *args, donate=donate, tuned=tuned, **static)(*args)

    def compile(
        self,
        function: Callable[..., Any],
        *args: Any,
        donate: tuple[str, ...] = (),
        chained: bool = False,
        tuned: bool = True,
        **static: Hashable,
    ) -> Executable:
        """The executable itself.

        Arguments:
        - `args`: trees of arrays, or of `jax.ShapeDtypeStruct` for arrays on the device.
        - `donate`: names of the function's arguments whose memory results may take.
        - `chained`: whether the function has chains of kernels (`jdllm.pallas.chain`).
        - `tuned`: whether matrix products are tried on the device while the executable is compiled.
        """
        return self.get(Program(function, args, static, donate, chained, tuned))

    def get(self, program: Program) -> Executable:
        """The executable that is kept, or that another thread is making, or else a new one."""
        key = _key(program)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
            awaited = self._awaited.get(key)
            if awaited is None:
                own = self._awaited[key] = concurrent.futures.Future()
        if awaited is not None:
            return awaited.result()
        try:
            executable = self._make(program)
        except BaseException as e:
            with self._lock:
                del self._awaited[key]
            own.set_exception(e)
            raise
        with self._lock:
            del self._awaited[key]
            self._kept[key] = executable
            while len(self._kept) > self.capacity:
                self._kept.popitem(last=False)
        own.set_result(executable)
        return executable

    def prepare(
        self,
        programs: Sequence[Program],
        progress: Progress = lambda *_: None,
        rest: Callable[[], Any] = lambda: None,
        threads: int | None = None,
    ) -> Prepared:
        """Compile or load all programs that are not yet kept.

        Tracing and lowering hold the interpreter's lock and run one after another; the backend compiles and
        loads in threads meanwhile. Chained programs come first, since they take the backend longest.

        Arguments:
        - `progress`: called in this thread whenever a program is ready.
        - `rest`: called at the end; its executables are counted too.
        - `threads`: of the backend; by default one for each processor, at most 16.

        Raises what the first program raises that cannot be compiled; those that have begun are finished.
        """
        start, compiled, loaded = time.perf_counter(), self.compiled, self.loaded
        pool = concurrent.futures.ThreadPoolExecutor(threads or min(16, os.cpu_count() or 1))
        with _ended(pool):
            ordered = sorted(programs, key=lambda program: not program.chained)
            futures = {pool.submit(self.get, program): program for program in ordered}
            for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
                future.result()
                progress(done, futures[future])
        rest()
        return Prepared(self.compiled - compiled, self.loaded - loaded, time.perf_counter() - start)

    def _make(self, program: Program) -> Executable:
        """The executable from the store; where it has none, compiled, and kept there."""
        devices = _devices(program, self.platform)
        kept_as = None
        if self.store is not None:
            kept_as = program_key(program, self._options(program), self.kernels, devices)
            if kept_as is not None and (found := self._load(kept_as, program, devices)) is not None:
                return found
        lowered = self._lower(program)
        with _cache_hits() as hits:
            executable = finish(program, lowered)
        with self._lock:
            self.compiled += 1
        # What JAX's own cache has loaded cannot be serialised again: it would fail when it runs.
        if self.store is not None and kept_as is not None and not hits:
            content = to_bytes(executable)
            if content is not None:
                self.store.save(kept_as, content)
        return executable

    def _load(self, key: str, program: Program, devices: tuple[Device, ...]) -> Executable | None:
        """What the store has under a key; an entry that cannot be loaded is forgotten."""
        assert self.store is not None
        content = self.store.load(key)
        if content is None:
            return None
        try:
            executable = from_bytes(content, program, devices)
        except Exception:  # whatever unpickling raises, or XLA: the entry is made again
            self.store.drop(key)
            return None
        with self._lock:
            self.loaded += 1
        return executable

    def _lower(self, program: Program) -> Lowered:
        with self._lowering, _uncollected(), preferring(self.kernels):
            return lower(program, self._options(program))

    def _options(self, program: Program) -> Any:
        return compiler_options(
            self.platform, chained=program.chained, tuned=program.tuned, concurrent=program.concurrent
        )


def _key(program: Program) -> Hashable:
    """What tells executables of this process apart; values of arrays are no part of it."""
    function, args, static, donate, chained, tuned, _, concurrent = program
    kinds = tuple(
        (leaf.shape, leaf.dtype, on_host(leaf), memory_kind_of(leaf)) for leaf in jax.tree.leaves(args)
    )
    return function, donate, chained, tuned, concurrent, kinds, tuple(sorted(static.items()))


def _devices(program: Program, platform: str) -> tuple[Device, ...]:
    """Where the program runs: on the cards over which arrays are spread, else where the first array is."""
    mesh = mesh_of(program.args)
    if mesh is not None:
        return tuple(mesh.devices.flat)
    for leaf in jax.tree.leaves(program.args):
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None:
            return tuple(sorted(sharding.device_set, key=lambda device: device.id))
    default = jax.config.jax_default_device
    return (default if isinstance(default, jax.Device) else jax.local_devices(backend=platform)[0],)


@contextlib.contextmanager
def _cache_hits() -> Iterator[list[str]]:
    """Yields the hits of JAX's compilation cache in this thread, as they happen."""
    hits, thread = [], threading.get_ident()

    def note(event: str, **_: Any) -> None:
        if event == _CACHE_HIT and threading.get_ident() == thread:
            hits.append(event)

    jax.monitoring.register_event_listener(note)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(note)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile: looking for it takes a twelfth of the time of a lowering, which makes
    millions of objects and little garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _ended(pool: concurrent.futures.ThreadPoolExecutor) -> Iterator[None]:
    """Wait for the tasks that a pool has begun; after an error the other tasks are given up."""
    try:
        yield
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()
