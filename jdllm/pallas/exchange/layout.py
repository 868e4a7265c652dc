"""What lies where in the memory that each card has for exchanges.

The memory begins with a line for each block of threads: a flag for each card that sends, and at the end of
the line numbers of what the block has done so far. Slots follow, one for each card that sends, for each of
some turns. A slot has an area for each block. Behind the slots are those of single rows, with an area for
each row. A block writes and reads its own areas only, whatever kernel the block belongs to. So a block waits
for the same block of the other cards only.
"""

MAX_BLOCKS = 256
"""The most blocks of threads of a kernel that exchanges: two for each processor of a card, nearly."""

LINE_BYTES = 128
"""Of a block: flags of 4 bytes, and numbers of 4 bytes behind them."""

ROUNDS_OFFSET = LINE_BYTES - 4
"""The number of rounds in which the block has sent an area."""

ROWS_OFFSET = LINE_BYTES - 8
"""The number of rows that the block has sent, where a block sends single rows."""

MAX_CARDS = ROWS_OFFSET // 4

AREA_BYTES = 16 * 2**10
"""What a block sends in a round."""

SLOT_BYTES = MAX_BLOCKS * AREA_BYTES

TURNS = 4
"""Slots of a card that sends. A block sends an area before it has seen what others sent a round before. So
another card may still add what came three rounds before."""

MAX_ROWS = 256
"""Of three cards or more: with more rows XLA's collective moves fewer bytes. Two cards send each byte once in
any way."""

ROW_AREAS = 64
"""The most single rows of a kernel."""

MAX_COLUMNS = 8192
"""Of a single row, in numbers of 16 bits."""

ROW_AREA_BYTES = 4 * MAX_COLUMNS
"""Every word of 32 bits has the number of the row beside it."""

ROW_TURNS = 2
"""A card that is one row ahead writes into the other half."""

_LINES_BYTES = MAX_BLOCKS * LINE_BYTES
_ADDRESS_WORDS = 2  # of 32 bits: JAX has no integers of 64 bits by default


def slot_offset(turn: int, sender: int, cards: int) -> int:
    """Where the slot of a card that sends begins, in bytes.

    Arguments:
    - `turn`: below `TURNS`.
    - `cards`: how many exchange.
    """
    return _LINES_BYTES + (turn * cards + sender) * SLOT_BYTES


def row_slot_offset(turn: int, sender: int, cards: int) -> int:
    """Where the slot of single rows of a card that sends begins, in bytes.

    Arguments:
    - `turn`: below `ROW_TURNS`.
    - `cards`: how many exchange.
    """
    return slot_offset(TURNS, 0, cards) + (turn * cards + sender) * ROW_AREAS * ROW_AREA_BYTES


def memory_bytes(cards: int) -> int:
    """Bytes that each of so many cards has for exchanges."""
    return row_slot_offset(ROW_TURNS, 0, cards)


def address_words(cards: int) -> int:
    """Words of 32 bits that each card has to know: its number and the addresses of all."""
    return _ADDRESS_WORDS * (1 + cards)
