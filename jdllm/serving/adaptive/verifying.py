"""The verifier's side of steps of adaptive parallel decoding: its pages, and the prompts that it reads."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jdllm.arrays import padded
from jdllm.compiling.executables import Executable, Program
from jdllm.decoding.adaptive import read
from jdllm.models.config import ModelConfig
from jdllm.planning.buckets import power_bucket
from jdllm.serving.adaptive.packing import VerifiedRows, pack_verified, parts_of
from jdllm.serving.adaptive.verifier import Verifier
from jdllm.serving.adaptive.verifier_keys import Spans, VerifierKeys
from jdllm.serving.fitting import check_fits
from jdllm.serving.on_device import OnDevice
from jdllm.serving.packing import smallest_request
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.request import Request

READ_ROWS = (128, 256, 512, 1024)
"""Rows of prompts that the verifier reads at a time."""


class ToVerify(NamedTuple):
    """What the verifier has to do for a step of some requests.

    - `spans`: the rows of each request.
    - `read`: reads what it has not stored before the windows; called before the step, in the thread of the
      parts.
    """

    spans: list[Spans]
    read: Callable[[], None]

    @property
    def windows(self) -> list[range]:
        """The rows of each request that the step evaluates."""
        return [span.window for span in self.spans]

    @property
    def rows(self) -> int:
        """The rows that the step evaluates."""
        return sum(map(len, self.windows))


class Verifying:
    """One verifier with what it stores, for all kinds of steps.

    Arguments:
    - `model`: the diffusion model on its device.
    - `verifier`: the autoregressive model.
    - `keys`: the keys and values that it has stored.
    """

    def __init__(self, model: OnDevice, verifier: Verifier, keys: VerifierKeys):
        self._denoising: ModelConfig = model.config
        self._executables, self._account = model.executables, model.account
        self.params, self.config = verifier
        self.keys = keys

    def hold(self, requests: Sequence[Request]) -> ToVerify:
        """Give the requests pages, and find the executables that read what is missing before their windows.

        Raises `MemoryBudgetError` where one does not fit.
        """
        spans = self.keys.hold(requests)
        pool, calls = self.keys.pool, []
        for parts in parts_of(requests, [span.unread for span in spans], READ_ROWS[-1]):
            rows = power_bucket(sum(len(part.rows) for part in parts), READ_ROWS[0])
            program = self._program(parts, rows, pool.book)
            executable = self._compiled(program, rows)
            calls.append(functools.partial(pool.run, executable, *program.args[:-1], writes=True))

        def read_all() -> None:
            for call in calls:
                call()

        return ToVerify(spans, read_all)

    def smallest(self, **sampling: Any) -> tuple[Request, PageBook]:
        """A request that asks for little, and a book of the verifier's in which nobody else has pages."""
        request, held = (
            smallest_request(self._denoising, transfer="adaptive", **sampling),
            self.keys.pool.book,
        )
        request.id, book = -1, PageBook.empty(held.pages, held.page_rows)
        return request, book.allocate(request.id, len(request.tokens))

    def programs(self) -> Iterator[Program]:
        """The readings of prompts."""
        yield from self._readings().values()

    def warm(self) -> None:
        """Compile the readings of prompts."""
        for rows, program in self._readings().items():
            self._compiled(program, rows)

    def _program(self, parts: Sequence[VerifiedRows], rows: int, book: PageBook) -> Program:
        pool = self.keys.pool
        tokens = np.concatenate([request.tokens[read.start : read.stop] for request, read in parts])
        packed = pack_verified(parts, self.config, book, rows, pool.pages)
        args = self.params, padded(tokens.astype(np.int32), rows), packed, pool.abstract
        name = f"verifier's reading of {rows} rows"
        return Program(read, args, {"config": self.config}, donate=("pool",), name=name)

    def _compiled(self, program: Program, rows: int) -> Executable:
        executable = self._executables.get(program)
        check_fits(self._account, f"the {program.name}", rows, executable)
        return executable

    def _readings(self) -> dict[int, Program]:
        """Readings of a single row, by the rows that they are compiled for."""
        request, book = self.smallest()
        return {rows: self._program([VerifiedRows(request, range(1))], rows, book) for rows in READ_ROWS}
