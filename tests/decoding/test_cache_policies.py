"""Cache policies: when they refresh, and what they may store."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.decoding.cache_policies import Phase, kept, phase, policy_of, steps_to_refresh
from jdllm.decoding.caches.policy import View
from jdllm.decoding.registry import POLICIES
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError

FULL, REFRESH, REUSE = Phase.FULL, Phase.REFRESH, Phase.REUSE


def view(start: int = 4, decoded: tuple[int, ...] = (), shifted: bool = False) -> View:
    """A sequence of 12 whose block ends at 8; it and what follows are masked, but for `decoded`."""
    masked = np.arange(12) >= start + shifted
    masked[list(decoded)] = False
    return View(12, start, 8, masked, shifted)


def phases(steps: int, **options) -> list[Phase]:
    sampling = SamplingParams(gen_length=8, **options)
    return [phase(sampling, step) for step in range(steps)]


def test_without_a_cache_every_step_is_full():
    assert phases(3) == [FULL] * 3
    assert policy_of(SamplingParams()) is None
    assert kept(SamplingParams(), 10) == 0


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_whole_caches_refresh_at_the_first_step_of_a_block(cache):
    assert phases(4, cache=cache) == [REFRESH, REUSE, REUSE, REUSE]


@pytest.mark.parametrize("cache", ["sparse", "head_sparse"])
def test_sparse_caches_wait_a_step(cache):
    assert phases(4, cache=cache) == [FULL, REFRESH, REUSE, REUSE]
    assert phases(3, cache=cache, refresh_delay=0) == [REFRESH, REUSE, REUSE]


def test_refreshes_come_again_at_multiples_of_the_interval():
    assert phases(9, cache="dual", refresh_interval=3) == [
        REFRESH, REUSE, REUSE, REFRESH, REUSE, REUSE, REFRESH, REUSE, REUSE
    ]  # fmt: skip
    assert phases(9, cache="sparse", refresh_delay=2, refresh_interval=4) == [
        FULL, FULL, REFRESH, REUSE, REFRESH, REUSE, REUSE, REUSE, REFRESH
    ]  # fmt: skip


def test_a_prompt_cache_refreshes_once():
    sampling = SamplingParams(cache="prompt")
    assert phases(4, cache="prompt") == [REFRESH, REUSE, REUSE, REUSE]
    assert [phase(sampling, step, block=1) for step in range(3)] == [REUSE] * 3
    assert steps_to_refresh(sampling, 0) == 0
    assert steps_to_refresh(sampling, 1) is steps_to_refresh(sampling, 0, block=1) is None


REFRESHING = sorted(name for name, policy in POLICIES.items() if not policy.once)


@given(
    st.sampled_from(REFRESHING),
    st.none() | st.integers(0, 9),
    st.none() | st.integers(0, 9),
    st.integers(0, 40),
)
def test_steps_to_a_refresh_are_those_that_reuse(cache, delay: int | None, interval: int | None, step: int):
    sampling = SamplingParams(cache=cache, refresh_delay=delay, refresh_interval=interval)
    count = steps_to_refresh(sampling, step)
    later = [phase(sampling, step + n) for n in range(20)]
    if count is None:
        assert set(later) == {Phase.REUSE}
    else:
        assert later[:count] == [Phase.REUSE] * count
        assert later[count] is not Phase.REUSE


def test_selective_refreshes_like_dkv_cache():
    """Evaluate everything at steps 0 and 1 and at every eighth."""
    reused = [step for step, p in enumerate(phases(20, cache="selective")) if p == REUSE]
    assert reused == [step for step in range(20) if step > 1 and step % 8]


@pytest.mark.parametrize("cache", ["prefix", "prompt"])
def test_these_store_what_is_left_of_the_block(cache):
    """In the first block, where the prompt cache stores, this is the prompt."""
    np.testing.assert_array_equal(POLICIES[cache].candidates(view()), range(4))


@pytest.mark.parametrize("cache", ["dual", "sparse", "head_sparse"])
def test_the_others_store_what_is_outside_the_block(cache):
    np.testing.assert_array_equal(POLICIES[cache].candidates(view()), [0, 1, 2, 3, 8, 9, 10, 11])


def test_selective_stores_what_is_decoded():
    np.testing.assert_array_equal(POLICIES["selective"].candidates(view(decoded=(5, 9))), [0, 1, 2, 3, 5, 9])


def test_selective_forwards_the_rows_that_predict_masks():
    decoded = POLICIES["selective"].candidates(view(start=3, decoded=(6, 7, 10), shifted=True))
    np.testing.assert_array_equal(decoded, [0, 1, 2, 6])  # 3, 7 and 10 come before masks


@given(
    st.sampled_from(list(POLICIES)),
    st.integers(1, 60),
    st.data(),
    st.floats(0.01, 1),
    st.booleans(),
)
def test_candidates_leave_out_all_that_may_commit(cache, length, data, retention, shifted):
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start + 1, length))
    masked = np.array(data.draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    candidates = POLICIES[cache].candidates(View(length, start, stop, masked, shifted))
    assert (np.diff(candidates) > 0).all()
    forwarded = np.setdiff1d(np.arange(length), candidates)
    in_block = np.arange(start, stop)[masked[start:stop]]
    assert np.isin(in_block, forwarded).all()
    share = retention if POLICIES[cache].scored else None
    sampling = SamplingParams(cache=cache, retention=share)
    assert 0 <= kept(sampling, len(candidates)) <= kept(sampling, length) <= length


def test_sparse_caches_keep_a_share():
    assert kept(SamplingParams(cache="head_sparse", retention=0.3), 9) == 2
    assert kept(SamplingParams(cache="dual"), 9) == 9


@pytest.mark.parametrize("cache", ["sparse", "head_sparse"])
def test_a_share_below_one_row_is_one(cache):
    """Of no candidates it is none: of a sequence that is one block, or of one mask alone."""
    sampling = SamplingParams(cache=cache, retention=1e-9)
    assert [kept(sampling, candidates) for candidates in (0, 1, 2, 400)] == [0, 1, 1, 1]
    assert kept(SamplingParams(cache=cache), 1) == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cache": "triple"}, "cache is 'triple', expected one of 'none', 'prefix'"),
        ({"cache": "dual", "cfg_scale": 1.0}, "cache 'dual' has no classifier-free guidance"),
        ({"cache": "prompt", "cfg_scale": 1.0}, "cache 'prompt' has no classifier-free guidance"),
        ({"cache": "prompt", "refresh_delay": 0}, "refresh_delay has no effect here"),
        ({"cache": "prompt", "refresh_interval": 4}, "refresh_interval has no effect here"),
        ({"cache": "prompt", "official_forcing": True}, "official_forcing has no effect here"),
        ({"cache": "dual", "prompt_masks": "official"}, "does not fill masks in the prompt"),
        ({"cache": "dual", "alg": "entropy", "quota": "batch"}, "cache 'dual' has none such"),
        ({"alg": "entropy", "block_length": 4, "gen_length": 8}, "blocks only with a cache"),
    ],
)
def test_refusals(options, reason):
    with pytest.raises(RequestError, match=reason):
        SamplingParams(**options)
