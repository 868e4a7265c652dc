"""How rows are cut into chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.chunks import ChunkConfig, chunk_rows


@given(st.integers(1, 500_000), st.integers(1, 600))
def test_chunks_are_whole_tiles_and_no_more_than_asked_for(rows: int, count: int):
    size = chunk_rows(rows, count)
    assert 1 <= size <= rows
    assert -(-rows // size) <= count
    assert size == rows or size % 128 == 0
    assert size - 128 < -(-rows // count), "no tile more than it takes"


@pytest.mark.parametrize("field", ["ffn", "query", "kv", "heads", "logits"])
@pytest.mark.parametrize("count", [0, -3])
def test_a_count_below_one_is_refused(field: str, count: int):
    with pytest.raises(ValueError, match=rf"ChunkConfig\.{field} is {count}"):
        ChunkConfig(**{field: count})


def test_equal_configurations_are_one_static_argument():
    assert hash(ChunkConfig(ffn=2, query=3)) == hash(ChunkConfig(ffn=2, query=3))
    assert ChunkConfig(ffn=2, query=3) != ChunkConfig(ffn=3, query=2)


def test_layers_are_whole_where_only_logits_are_cut():
    assert ChunkConfig(logits=7).layers_whole
    assert not any(ChunkConfig(**{name: 2}).layers_whole for name in ("ffn", "query", "kv", "heads"))
