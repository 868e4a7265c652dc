"""The ladders of compiled sizes."""

MAX_STEPS_PER_DISPATCH = 64

_SMALLEST_ROWS = 128
_LARGE_STRIDE = 4096
_SMALLEST_HEAD = 32
_LARGEST_TRACE = 1 << 20


def row_bucket(rows: int) -> int:
    """The smallest compiled number of packed rows that holds `rows`.

    Each power of two up to 32k is reached in four equal strides, so that sizes grow by at most a quarter and
    are multiples of 32 (from 512 rows on of 128, which is what kernels tile by); then strides are 4096, and
    from 128k on each power of two is reached in 32 strides: all sizes divide into many equal chunks.
    """
    rows = max(rows, _SMALLEST_ROWS)
    below = 1 << (rows - 1).bit_length() - 1
    stride = max(min(below // 4, _LARGE_STRIDE), below // 32)
    return -(-rows // stride) * stride


def fine_bucket(count: int) -> int:
    """The smallest number of a fine ladder that holds `count`: at most a sixteenth more, or 32 rows."""
    below = 1 << max(count - 1, 1).bit_length() - 1
    stride = max(32, below // 16)
    return -(-max(count, 1) // stride) * stride


def power_bucket(count: int, smallest: int) -> int:
    """The smallest power of two times `smallest` that holds `count`."""
    size = smallest
    while size < count:
        size *= 2
    return size


def head_bucket(count: int) -> int:
    """The smallest compiled number of head rows that holds `count`."""
    return power_bucket(count, _SMALLEST_HEAD)


def steps_per_dispatch(head_rows: int) -> int:
    """Denoising steps that one dispatch may do: its trace, a token for each head row and step, is bounded."""
    return max(1, min(MAX_STEPS_PER_DISPATCH, _LARGEST_TRACE // head_rows))
