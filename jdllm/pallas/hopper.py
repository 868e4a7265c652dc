"""What kernels know of an H100 or H200."""

WARPGROUP_ROWS = 64
"""Rows of one product of a warpgroup."""

STRIP = 8
"""Rows of a swizzled block in shared memory, at multiples of which copies start. Of as many columns of a
product each thread holds two."""

SWIZZLE = 128
"""Bytes of a row of such a block: the widest swizzle."""

SWIZZLE_COLUMNS = SWIZZLE // 2
"""The same in numbers of 16 bits."""

PROCESSORS = 132
"""Streaming multiprocessors."""

SHARED_BYTES = 224 * 1024
"""Shared memory of a block that operands may take; 3 KiB more hold barriers and scratch of reductions."""

_THREADS = 128  # of a warpgroup
_REGISTERS = 65536  # of a processor
_MOST_REGISTERS = 256  # of a thread


def padded_rows(rows: int) -> int:
    """`rows`, rounded up to whole blocks of shared memory."""
    return -(-rows // STRIP) * STRIP


def consumer_registers(consumers: int, *others: int) -> int:
    """What a thread of a consumer may have in a block of so many consumers and some other warpgroups.

    A block starts with the same number for every thread, a multiple of 8 as any. Warpgroups can pass on only
    what these make together: who asks for more waits forever.

    Arguments:
    - `consumers`: warpgroups that multiply.
    - `others`: what a thread of each other warpgroup keeps.
    """
    warpgroups = consumers + len(others)
    initial = _REGISTERS // (warpgroups * _THREADS) // 8 * 8
    return min((warpgroups * initial - sum(others)) // consumers // 8 * 8, _MOST_REGISTERS)
