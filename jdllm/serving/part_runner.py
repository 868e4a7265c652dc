"""How parts of all kinds find their executable: choose a size, pack, compile, check that it fits."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jdllm.compiling.executables import Executable, Program
from jdllm.planning.ladder import Entry, Sizes
from jdllm.serving.background import Background
from jdllm.serving.fitting import check_fits
from jdllm.serving.on_device import OnDevice


class Need(NamedTuple):
    """What a part needs.

    - `rows`, `head_rows`, `segments`: packed rows, head rows and requests.
    - `steps`: steps that the part may do.
    """

    rows: int
    head_rows: int
    segments: int
    steps: int = 1


class Packed[Batch](NamedTuple):
    """A part of one size.

    - `batch`: the packed requests.
    - `program`: what runs them.
    """

    batch: Batch
    program: Program


class Chosen[Batch](NamedTuple):
    """A part that is ready to run.

    - `entry`: its size.
    - `batch`: the packed requests.
    - `executable`: compiled for this size; it passes the numbers of the host that are in `arguments`.
    - `arguments`: the arguments of the executable, the KV pool among them as shapes.
    """

    entry: Entry
    batch: Batch
    executable: Executable
    arguments: tuple[Any, ...]


class PartRunner:
    """Finds executables for parts.

    Arguments:
    - `model`: the model on its device.
    - `background`: compiles sizes that fit better than those that serve now.
    """

    def __init__(self, model: OnDevice, background: Background):
        self._model = model
        self._background = background

    def choose[Batch](
        self, sizes: Sizes, pack: Callable[[Entry], Packed[Batch]], need: Need
    ) -> Chosen[Batch]:
        """The size that serves a part now. A size that would fit better is compiled in the background.

        Arguments:
        - `sizes`: the sizes of this kind of part.
        - `pack`: packs the part for a size.
        - `need`: what the part needs.

        Raises `MemoryBudgetError` where the executable does not fit, before anything of the part has run.
        """
        entry = sizes.choose(*need)
        batch, program = pack(entry)
        executable = self.compiled(program, entry)
        sizes.compiled.add(entry)
        missing = sizes.missing(*need[:3])
        if missing is not None and self._background.idle:
            later = pack(missing).program
            make = functools.partial(self.compiled, later, missing)
            self._background.start(sizes, missing, later.name, make)
        # While parts before run: the device waits for what a launch does.
        return Chosen(entry, batch, executable.sending(*program.args), program.args)

    def compiled(self, program: Program, entry: Entry) -> Executable:
        """The executable of a program, or `MemoryBudgetError` where it does not fit."""
        executable = self._model.executables.get(program)
        what = f"a {program.name} beside a pool of {self._model.account.pages} pages"
        check_fits(self._model.account, what, entry.rows, executable)
        return executable
