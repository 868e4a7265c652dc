"""Where parts and flags of an exchange lie in the memory that each card has for it.

The memory begins with a line for each block of threads: a flag for each card that sends, and at the end of
the line the number of sums so far. Slots follow, one for each card that sends, twice over: sums take them by
turns. A slot has an area for each block. A block writes and reads its own areas only, whatever kernel the
block belongs to. So a block waits for the same block of the other cards only.
"""

BLOCKS = 128
"""The most blocks of threads of a kernel that exchanges."""

LINE_BYTES = 128
"""Of a block: flags of 4 bytes, and the number of sums in the last 4 bytes."""

COUNT_OFFSET = LINE_BYTES - 4

MAX_CARDS = COUNT_OFFSET // 4

SLOT_BYTES = 2 * 2**20
"""The largest part of a card: 256 rows of 4096 numbers of 16 bits."""

AREA_BYTES = SLOT_BYTES // BLOCKS
"""The largest part of a block."""

MAX_ROWS = 256
"""With more rows XLA's collective moves fewer bytes, and what it takes to start counts less."""

TURNS = 2
"""A card that is one sum ahead writes into the other half of the slots."""

_LINES_BYTES = BLOCKS * LINE_BYTES
_ADDRESS_WORDS = 2  # of 32 bits: JAX has no integers of 64 bits by default


def slot_offset(turn: int, sender: int, cards: int) -> int:
    """Where the slot of a card that sends begins, in bytes.

    Arguments:
    - `turn`: 0 or 1.
    - `cards`: how many exchange.
    """
    return _LINES_BYTES + (turn * cards + sender) * SLOT_BYTES


def memory_bytes(cards: int) -> int:
    """Bytes that each of so many cards has for exchanges."""
    return slot_offset(TURNS, 0, cards)


def address_words(cards: int) -> int:
    """Words of 32 bits that each card has to know: its number and the addresses of all."""
    return _ADDRESS_WORDS * (1 + cards)
