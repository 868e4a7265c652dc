"""Numbers of bytes as users write and read them."""

import re
from collections.abc import Callable

from jdllm.errors import ConfigError

DEFAULT_HOST_MEMORY = "64GiB"

EXPECTED = "bytes such as 17179869184, '24G' or '24GiB'"

_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", 1)
    for suffix, base in (("b", 1000), ("ib", 1024), ("", 1024))
}


def parse_bytes(value: int | str, name: str = "memory") -> int:
    """A number of bytes, such as 17179869184, "16GiB", "16G" (the same) or "24 GB" (decimal).

    Raises `ConfigError`, naming `name`, for anything else and for numbers that are not positive.
    """
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", str(value))
    if (
        match is None
        or match[2].lower() not in _UNITS
        or (size := int(float(match[1]) * _UNITS[match[2].lower()])) < 1
    ):
        raise ConfigError(f"{name} is {value!r}, expected {EXPECTED}")
    return size


def parse_host_memory(value: int | str, name: str = "host_memory") -> int:
    """As `parse_bytes`, but "0" is none."""
    return 0 if str(value).strip() == "0" else parse_bytes(value, name)


def format_bytes(count: int, rounded: Callable[[float], int] = round) -> str:
    """A number of bytes in the largest binary unit that it reaches, such as "3.08 GiB".

    Arguments:
    - `rounded`: to hundredths; `math.ceil` and `math.floor` never say too little or too much.
    """
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{rounded(100 * count / 1024**power) / 100:.2f} {unit}"
    return f"{count} B"
