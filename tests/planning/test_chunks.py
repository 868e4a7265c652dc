"""How rows are cut into chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.planning.chunks import ChunkConfig, chunk_bounds


@given(st.integers(1, 5000), st.integers(1, 600))
def test_chunks_cover_all_rows_once_and_evenly(rows: int, count: int):
    bounds = chunk_bounds(rows, count)
    assert [row for start, stop in bounds for row in range(start, stop)] == list(range(rows))
    assert 1 <= len(bounds) <= count
    sizes = [stop - start for start, stop in bounds]
    assert min(sizes) >= 1
    assert max(sizes) == -(-rows // min(count, rows))
    assert len(set(sizes[:-1])) <= 1


@pytest.mark.parametrize("field", ["ffn", "query", "logits"])
@pytest.mark.parametrize("count", [0, -3])
def test_a_count_below_one_is_refused(field: str, count: int):
    with pytest.raises(ValueError, match=rf"ChunkConfig\.{field} is {count}"):
        ChunkConfig(**{field: count})


def test_equal_configurations_are_one_static_argument():
    assert hash(ChunkConfig(2, 3, 4)) == hash(ChunkConfig(ffn=2, query=3, logits=4))
    assert ChunkConfig(2, 3, 4) != ChunkConfig(3, 2, 4)
