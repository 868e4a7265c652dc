"""The choice of how requests generate that leave this to the engine, in a made-up world."""

import dataclasses
import itertools
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.models.hf_config import config_from_hf
from jdllm.serving.auto_spec import AutoSpec
from jdllm.serving.demands import Kind
from jdllm.serving.modes.blocks import Blocks
from jdllm.serving.request import Request
from jdllm.serving.updates import PartDone, PartTimes
from jdllm.serving.ways import HALF_LIFE, Expected, Ways, quickest
from tests.helpers import Golden

BLOCK, TEXT = 4, 64
CONFIG = dataclasses.replace(config_from_hf(Golden("sdar").directory), block_length=BLOCK, mask_id=319)
LOSSLESS = SamplingParams(gen_length=TEXT, generation_mode="auto")
ANY = LOSSLESS.changed(transfer="dynamic", threshold=0.9)
MS = 1e-3


def seconds_for(text: int, way: Expected) -> Fraction:
    """Seconds until so many tokens are there, evaluation by evaluation."""
    seconds, tokens = Fraction(0), Fraction(0)
    while tokens < text:
        seconds, tokens = seconds + Fraction(way.seconds), tokens + Fraction(way.tokens)
    return seconds


def test_the_quickest_way_finishes_a_long_text_first():
    rng = np.random.default_rng(0)
    for _ in range(50):
        ways = [Expected(*rng.integers(1, 9, 2).tolist()) for _ in range(rng.integers(1, 4))]
        # A text of so many tokens ends with a whole evaluation of each.
        text = 8 * 7 * 6 * 5 * 3
        seconds = [seconds_for(text, way) for way in ways]
        assert quickest(ways) == seconds.index(min(seconds))


class World:
    """What evaluations take and commit, of which the choice knows nothing before.

    - `seconds`: of an evaluation of a way where so many requests run.
    - `tokens`: that it commits to each.
    """

    def __init__(
        self, seconds: Callable[[str, int], float], tokens: dict[str, float], *, in_step: bool = False
    ):
        self.seconds, self.tokens = seconds, tokens
        self.ways = Ways(Blocks().requests, lambda requests, rows, stored: 1 * MS, in_step=in_step)
        self._ids = itertools.count()

    def run(self, sampling: SamplingParams, running: int) -> str:
        """As many equal requests as run, from beginning to end; the way that they generate in."""
        spec = Blocks().spec(np.arange(20), sampling, CONFIG)
        asked = [Request(spec, next(self._ids)) for _ in range(running)]
        begun = [self.ways.begun(request, running) for request in asked]
        [(name, kind)] = {(request.way.name, type(request)) for request in begun if request.way}
        evaluations = round(TEXT / self.tokens[name])
        for request in begun:
            request.committed = 0.0
        self.ways.learn(self._part(begun, evaluations, self.seconds(name, running)), begun)
        for request in begun:
            request.committed_in[:TEXT], request.committed_in[TEXT:] = 0, -1
            request.steps = evaluations
            self.ways.end(request)
        assert [request.id for request in begun] == [request.id for request in asked]
        assert all(kind is Blocks.requests[type(request.spec)] for request in begun)
        return name

    def quickest(self, names: list[str], running: int) -> str:
        return max(names, key=lambda name: self.tokens[name] / self.seconds(name, running))

    def _part(self, requests: list[Request], steps: int, seconds: float) -> PartDone:
        times = PartTimes((0.0,), 0.0, 0.0, 0.0, steps * seconds, steps * seconds)
        return PartDone(Kind.REUSE, tuple(r.id for r in requests), 8, 0, 1, steps, 0.0, times)


def shared(one: float, each: float) -> Callable[[str, int], float]:
    """Evaluations of 2, 6 and 4 rows for each request: some seconds for all, and some for each row."""
    rows = {"autoregressive": 2, "self_speculation": 6, "diffusion": 4}
    return lambda name, running: one + each * rows[name] * running


NAMES = ["autoregressive", "self_speculation", "diffusion"]


@pytest.mark.parametrize("drafted", [0.6, 0.9, 1.4, 1.9])
@pytest.mark.parametrize(("sampling", "names"), [(LOSSLESS, NAMES[:2]), (ANY, NAMES)])
def test_the_choice_finds_the_quickest_way_at_every_load(
    drafted: float, sampling: SamplingParams, names: list[str]
):
    """Where few run, evaluations take as long whatever they commit; where many do, rows count."""
    tokens = {"autoregressive": 1.0, "self_speculation": drafted, "diffusion": 1.7}
    world = World(shared(4 * MS, 0.1 * MS), tokens)
    for running in (1, 4, 32):
        for _ in range(20):
            world.run(sampling, running)
        assert world.run(sampling, running) == world.quickest(names, running)


def test_the_crossover_is_where_rates_cross():
    """Drafts of 1.25 tokens an evaluation pay off up to two requests: 4 + 0.6 n < 1.25 (4 + 0.2 n)."""
    tokens = {"autoregressive": 1.0, "self_speculation": 1.25}
    found = {}
    for running in (1, 2, 4, 8, 16, 32):
        world = World(shared(4 * MS, 0.1 * MS), tokens)
        found[running] = [world.run(LOSSLESS, running) for _ in range(12)][-1]
    drafts = [running for running, name in found.items() if name == "self_speculation"]
    assert drafts == [1, 2]


def test_what_changes_is_noticed():
    """Drafts that failed are tried again, and then stay."""
    world = World(shared(4 * MS, 0.0), {"autoregressive": 1.0, "self_speculation": 0.5})
    before = [world.run(LOSSLESS, 1) for _ in range(20)]
    assert before[-1] == "autoregressive"
    world.tokens["self_speculation"] = 1.9
    after = [world.run(LOSSLESS, 1) for _ in range(8 * HALF_LIFE // TEXT)]
    assert after[0] == "autoregressive"
    assert after[-1] == "self_speculation"


def test_no_clock_decides_in_step_with_others():
    """Processes whose evaluations take other times choose the same, by what is committed."""
    tokens = {"autoregressive": 1.0, "self_speculation": 0.8, "diffusion": 1.2}
    clocks = [lambda name, running: 1.0, lambda name, running: 1e3 if name == "diffusion" else 1e-6]
    worlds = [World(clock, tokens, in_step=True) for clock in clocks]
    chosen = [[world.run(ANY, running) for running in (1, 2, 32) * 4] for world in worlds]
    assert chosen[0] == chosen[1]
    assert chosen[0][-1] == "diffusion"


@pytest.mark.parametrize(("sampling", "names"), [(LOSSLESS, NAMES[:2]), (ANY, NAMES)])
def test_a_request_has_what_its_ways_need(sampling: SamplingParams, names: list[str]):
    spec = Blocks().spec(np.arange(21), sampling, CONFIG)
    assert isinstance(spec, AutoSpec)
    assert [way.name for way in spec.ways] == names
    assert {(way.spec.returned.start, way.spec.returned.stop) for way in spec.ways} == {(21, 21 + TEXT)}
    assert spec.returned == slice(21, 21 + TEXT)
    assert spec.positions == 21 + TEXT + BLOCK - 1
    assert len(spec.tokens) == (21 + TEXT if len(names) == 2 else 24 + TEXT)


def test_requests_that_say_how_are_left_alone():
    world = World(shared(1.0, 0.0), {})
    request = Blocks.requests[type(spec := Blocks().spec([1], SamplingParams(gen_length=4), CONFIG))](spec, 3)
    assert world.ways.begun(request, 1) is request
