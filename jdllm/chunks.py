"""How the operators of one step are cut into chunks."""

import dataclasses

TILE = 128
"""Rows by which kernels tile: a chunk of whole tiles is never padded."""


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """Chunk counts of one executable: hashable, a static argument of the step.

    - `ffn`: chunks of all rows through the feed-forward layer.
    - `query`: chunks of all rows through query projection, attention and output projection.
    - `kv`: chunks of all rows through the projection of keys and values.
    - `heads`: groups of key-value heads that go through attention one after another, so that the keys and
      values of one group exist at a time; it must divide the key-value heads.
    - `logits`: chunks of the masked rows through the head.

    A count of 1 leaves the operator whole. Counts change memory and speed, never results: every chunk
    computes its rows exactly as the whole operator would.
    """

    ffn: int = 1
    query: int = 1
    kv: int = 1
    heads: int = 1
    logits: int = 1

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"ChunkConfig.{field.name} is {getattr(self, field.name)}, expected at least 1"
                )

    @property
    def layers_whole(self) -> bool:
        """Whether no operator inside a layer is cut."""
        return self.ffn == self.query == self.kv == self.heads == 1

    def in_loops(self) -> "ChunkConfig":
        """The counts that run where any operator inside a layer is cut: at least two chunks of rows in each.

        A whole operator between loops would not work in place: XLA would keep a second residual stream.
        """
        ffn, query, kv = (max(count, 2) for count in (self.ffn, self.query, self.kv))
        return dataclasses.replace(self, ffn=ffn, query=query, kv=kv)


UNCUT = ChunkConfig()
"""No operator is cut."""


def chunk_rows(rows: int, count: int) -> int:
    """Rows of a chunk where `rows` are cut into at most `count`: whole tiles of 128, or all rows."""
    size = -(-rows // count)
    return min(rows, -(-size // TILE) * TILE)
