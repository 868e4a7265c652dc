"""Keys and values of one sequence, layer by layer, of which some are in host memory."""

import itertools
from collections import deque
from collections.abc import Iterator

import jax
from jaxtyping import Array

from jdllm.host_memory import Device, to_device, to_host
from jdllm.models.layer import KeysValues


class LayerKeys:
    """First each layer of a sequence stores what it has computed, in order. Then layers are read in order,
    again and again.

    Arguments:
    - `layers`: of the model.
    - `kept`: how many of the last layers stay on the device while layers store.
    - `kept_behind`: how many of them are on the device while layers are read, at least as many.
    """

    def __init__(self, layers: int, kept: int, kept_behind: int):
        self._layers, self._kept, self._kept_behind = layers, kept, kept_behind
        self._stored: list[KeysValues] = []
        self._leaving: deque[KeysValues] = deque()
        self._away: Iterator[int] | None = None
        self._fetched: tuple[int, KeysValues] | None = None

    def __len__(self) -> int:
        """How many layers have stored."""
        return len(self._stored)

    def store(self, stored: KeysValues) -> None:
        """Take the keys and values of the next layer. They are on the device until they have left."""
        if len(self) < self._layers - self._kept:
            stored = to_host(stored, _device_of(stored))
            self._leaving.append(stored)
        self._stored.append(stored)

    def wait_for_leaving(self) -> None:
        """Before another layer is enqueued, which takes its memory then: one may be leaving, beside it."""
        while len(self._leaving) > 1:
            jax.block_until_ready(self._leaving.popleft())

    def of(self, number: int, done: Array | None) -> KeysValues:
        """Those of a layer on the device; the next layer in host memory is on its way then.

        XLA starts a copy after all computation that was enqueued before it, and a copy takes its memory when
        it is enqueued: the layer before was computed, and this one is not enqueued yet.

        Arguments:
        - `number`: of the layer; the first one read is the first layer.
        - `done`: exists when the layer before is computed; `None` if none was.
        """
        if self._away is None:
            self._away = self._begin()
        if number >= self._layers - self._kept_behind:
            return self._stored[number]
        if self._fetched is None:
            self._fetched = self._fetch(self._away)
        ready, here = self._fetched
        assert ready == number
        self._fetched = None
        jax.block_until_ready(done)
        self._fetched = self._fetch(self._away)
        return here

    def replace(self, number: int, changed: KeysValues) -> None:
        """Take a layer's keys and values back whose arrays were donated; a copy of host memory is dropped."""
        if number >= self._layers - self._kept_behind:
            self._stored[number] = changed

    def _begin(self) -> Iterator[int]:
        """Layers that are in host memory, in the order in which they are read; those that fit are back."""
        jax.block_until_ready(list(self._leaving))
        self._leaving.clear()
        for number in range(self._layers - self._kept_behind, self._layers - self._kept):
            self._stored[number] = jax.block_until_ready(_fetched(self._stored[number]))
        return itertools.cycle(range(self._layers - self._kept_behind))

    def _fetch(self, away: Iterator[int]) -> tuple[int, KeysValues]:
        number = next(away)
        return number, _fetched(self._stored[number])


def _fetched(stored: KeysValues) -> KeysValues:
    return to_device(stored, _device_of(stored))


def _device_of(stored: KeysValues) -> Device:
    (device,) = stored[0].devices()
    return device
