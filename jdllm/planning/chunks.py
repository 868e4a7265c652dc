"""How the operators of one step are cut into row chunks."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """Chunk counts of one executable: hashable, a static argument of the step.

    - `ffn`: chunks of all rows through the feed-forward layer.
    - `query`: chunks of all rows through query projection, attention and output projection.
    - `logits`: chunks of the masked rows through the head.

    A count of 1 leaves the operator whole. Counts change memory and speed, never results: every chunk
    computes the rows that it holds exactly as the whole operator would.
    """

    ffn: int = 1
    query: int = 1
    logits: int = 1

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"ChunkConfig.{field.name} is {getattr(self, field.name)}, expected at least 1"
                )


def chunk_bounds(rows: int, count: int) -> list[tuple[int, int]]:
    """Cut `rows` into at most `count` near-equal ranges [start, stop), none empty."""
    size = -(-rows // min(count, rows))
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]
