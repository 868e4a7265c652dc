"""The scheduler in a time of its own: by hand, beside a run on a card, and from a trace of an engine."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.generations import GEN_LENGTH, WORKLOAD
from benchmarks.recorded_trace import read_trace
from benchmarks.simulation import Asked, Host, Outcome, cut, limits_of, simulate
from jdllm.bench.workload import poisson_arrivals, read_workload
from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.demands import Kind
from jdllm.serving.trace import Trace
from jdllm.serving.updates import PartDone
from tests.engines import engine_of, finish, generation_request

TIMES = {Kind.REFRESH: {128: 0.010}, Kind.REUSE: {32: 0.002, 64: 0.003}}


def test_one_request_takes_its_parts_and_the_host():
    alone = [Asked(0.0, 4, 8, blocks=1)]
    assert simulate(alone, TIMES, Host()).latency == pytest.approx([0.010 + 3 * 0.002])
    host = Host(packing=0.001, packing_each=0.0005, launch=0.0002, taking=0.003, taking_each=0.0001)
    # The first reuse does one step: nobody knows yet how long a step takes.
    steps = (0.010 + 0.0001, 0.002 + 0.0001, 2 * (0.002 + 0.0001))
    found = simulate(alone, TIMES, host)
    assert found.latency == pytest.approx([sum(0.0015 + 0.0002 + took + 0.003 for took in steps)])
    assert (found.evaluated, found.served) == (4, 4)
    assert found.padding == pytest.approx((128 - 8) / (128 + 3 * 32))


def test_steps_follow_one_another_without_the_host():
    """Steps take longer than the host, which has packed the next one when a step ends. The first two steps
    wait for the host: nobody knows yet how long a step takes."""
    host = Host(packing=0.001, taking=0.002)
    times = {Kind.REFRESH: {128: 0.010}, Kind.REUSE: {32: 0.004}}
    alone = [Asked(0.0, 4, 12, blocks=2)]  # blocks of a refresh and three reuses
    first, second = 0.010 + 2 * 0.003 + 3 * 0.004, 0.010 + 3 * 0.004
    found = simulate(alone, times, host)
    assert found.latency == pytest.approx([0.001 + first + 0.003 + second + 0.002])


def test_a_single_step_on_an_idle_device_waits_for_its_launches():
    alone = [Asked(0.0, 4, 6, blocks=1)]  # a refresh and a single step
    late = Host(taking=0.001, waking=0.004)
    assert simulate(alone, TIMES, late).latency == pytest.approx([0.010 + 0.001 + 0.004 + 0.002 + 0.001])
    assert simulate(alone, TIMES, Host(waking=0.004)).latency == pytest.approx([0.010 + 0.002])
    more = [Asked(0.0, 4, 8, blocks=1, ahead=False)]  # another two steps in a loop
    assert simulate(more, TIMES, late).latency == pytest.approx([0.018 + 2 * 0.002 + 0.001])


def test_two_that_arrive_together_share_their_parts():
    found = simulate([Asked(0.0, 4, 8, blocks=1)] * 2, TIMES, Host())
    assert found.latency == pytest.approx([0.010 + 3 * 0.003] * 2)
    assert (found.evaluated, found.served) == (4, 8)


def test_who_comes_later_waits_for_the_device():
    first, second = simulate(
        [Asked(0.0, 4, 8, blocks=1), Asked(0.004, 4, 8, blocks=1)], TIMES, Host()
    ).latency
    # The second refresh is packed behind the first; then the first goes on alone, a step at a time.
    assert first == pytest.approx(0.010 + 0.010 + 0.002 + 2 * 0.003, abs=0.004)
    assert second >= 0.006 + 0.010 + 3 * 0.002


class TestCard:
    """`jdllm bench serve` at 1.5 a second, LLaDA-8B's shape on an H100, head_sparse with delay 0, at commit
    6d9c88a with one step beside others: mean latency 11.18 s, 99 % within 18.80 s, 6313 evaluations."""

    REFRESHES = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 18432, 24576, 36864)
    REUSES = (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
    TIMES = {  # noqa: RUF012  # nothing changes it
        Kind.REFRESH: {
            512: 0.0182,
            768: 0.0242,
            1024: 0.0290,
            1536: 0.0411,
            2048: 0.0521,
            3072: 0.0767,
            4096: 0.1000,
            6144: 0.1493,
            8192: 0.195,
            36864: 0.875,
        },
        Kind.REUSE: {
            32: 0.0066,
            64: 0.0070,
            128: 0.0084,
            256: 0.01015,
            384: 0.0123,
            512: 0.0159,
            768: 0.0220,
            1024: 0.0287,
            1536: 0.0403,
        },
    }
    HOST = Host(0.00122, 0.000092, 0.0027, 0.00082, 0.0002)

    @pytest.fixture
    def asked(self) -> list[Asked]:
        lengths = read_workload(WORKLOAD).lengths(np.random.default_rng(0), 200)
        arrivals = poisson_arrivals(1.5, 200, seed=0)
        prompts = zip(arrivals, lengths, strict=True)
        return [Asked(at, length, length + GEN_LENGTH, ahead=False) for at, length in prompts]

    def test_its_latency_is_reproduced(self, asked: list[Asked]):
        found = simulate(asked, self.TIMES, self.HOST, limits_of(sizes=self.REFRESHES), self.REUSES)
        assert found.latency.mean() == pytest.approx(11.18, rel=0.1)
        assert np.percentile(found.latency, 99) == pytest.approx(18.80, rel=0.1)
        assert found.evaluated == pytest.approx(6313, rel=0.1)

    def test_more_sizes_leave_less_padding_and_less_latency(self, asked: list[Asked]):
        before = simulate(asked, self.TIMES, self.HOST, limits_of(sizes=self.REFRESHES), self.REUSES)
        now = simulate(asked, self.TIMES, self.HOST)
        assert now.padding < 0.6 * before.padding
        assert now.latency.mean() < 0.9 * before.latency.mean()


def test_rows_beyond_the_largest_measured_step_cost_time():
    """A scheduler that fills larger steps than those of the trace gets nothing for free."""
    alone = [Asked(0.0, 636, 640, blocks=1)]
    assert simulate(alone, TIMES, Host()).latency == pytest.approx([5 * 0.010 + 3 * 0.002])


def test_a_refresh_in_parts_takes_as_long_as_a_whole_one():
    whole = [Asked(0.0, 4, 12, blocks=2)]
    parts = [whole[0]._replace(refresh_parts=4)]
    assert simulate(parts, TIMES, Host()).latency == pytest.approx(simulate(whole, TIMES, Host()).latency)
    assert simulate(parts, TIMES, Host(taking=0.001)).latency == pytest.approx(
        simulate(whole, TIMES, Host(taking=0.001)).latency + 2 * 3 * 0.001
    )


def test_long_refreshes_are_cut_into_parts_of_about_as_many_rows_times_layers():
    lengths = (4096, 4097, 8192, 32768)
    found = cut([Asked(0.0, 1, length) for length in lengths], layers=32)
    assert [one.refresh_parts for one in found] == [1, 3, 4, 16]


class TestMixedTraffic:
    """Chats at 0.5 a second beside one long request, LLaDA-8B on an H200. Sizes of refreshes above 4,096 rows
    were not measured one by one: their seconds follow rows and squared rows."""

    REFRESHES = (128, 512, 1024, 2048, 4096, 6144, 8192, 12288, 18432, 24576, 36864)
    TIMES = {  # noqa: RUF012  # nothing changes it
        Kind.REFRESH: {rows: 0.003 + rows * 26e-6 + rows**2 * 0.9e-9 for rows in REFRESHES},
        Kind.REUSE: TestCard.TIMES[Kind.REUSE],
    }

    def outcome(self, *, in_parts: bool) -> tuple[Outcome, np.ndarray]:
        """What came of all, and which of them are chats that run beside the long request."""
        rng = np.random.default_rng(0)
        prompts = rng.integers(500, 1500, 60).tolist()
        arrivals = poisson_arrivals(0.5, 60, seed=0)
        long = Asked(arrivals[20], 32768 - GEN_LENGTH, 32768)
        chats = [Asked(at, n, n + GEN_LENGTH) for at, n in zip(arrivals, prompts, strict=True)]
        asked = [*chats[:21], long, *chats[21:]]
        beside = [one is not long and abs(one.arrival - long.arrival) < 20 for one in asked]
        return simulate(cut(asked, 32) if in_parts else asked, self.TIMES, TestCard.HOST), np.array(beside)

    def test_chats_wait_less_for_a_step_and_end_sooner(self):
        (before, beside), (now, _) = (self.outcome(in_parts=x) for x in (False, True))
        waits, latencies = (
            [one[beside] for one in x]
            for x in zip(*((out.longest_wait, out.latency) for out in (before, now)), strict=True)
        )
        assert waits[0].max() > 2.0
        assert waits[1].max() < 0.5
        assert waits[1].mean() < waits[0].mean() / 3
        assert latencies[1].mean() < 0.85 * latencies[0].mean()
        assert latencies[1].max() < 0.85 * latencies[0].max()
        assert now.latency[21] < 1.25 * before.latency[21]


def test_a_trace_is_read_as_the_engine_tells_it(
    params: Params, config: ModelConfig, executables: Executables, tmp_path: Path
):
    engine = engine_of(params, config, executables, 128)
    engine.trace = Trace(tmp_path / "trace.json")
    parts: list[PartDone] = []
    engine.observe = parts.append
    sampling = SamplingParams(gen_length=8, block_length=4, early_stop=False, cache="dual")
    prompts = [np.arange(1, n + 1) for n in (5, 9, 7)]
    _, states = finish(engine, [generation_request(i, p, sampling, config) for i, p in enumerate(prompts)])
    engine.close()
    found = read_trace(tmp_path / "trace.json")
    assert [(one.prompt, one.length, one.blocks) for one in found.asked] == [
        (5, 13, 2),
        (9, 17, 2),
        (7, 15, 2),
    ]
    assert found.latency == pytest.approx([state.timings().total for state in states], rel=0.2, abs=0.02)
    assert found.evaluated == sum(part.steps for part in parts)
    sizes = {(part.kind, part.rows + part.padding) for part in parts}
    assert {(kind, rows) for kind, times in found.times.items() for rows in times} == sizes
    again = simulate([one._replace(arrival=0.0) for one in found.asked], found.times, found.host)
    assert again.evaluated == found.evaluated
