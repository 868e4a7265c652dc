"""Cards that need not be there, described in `targets/*.textproto` as XLA describes one.

A description's first line names where its numbers are from. `device_memory_size` is what CUDA says in all on
Linux: less than the card is sold with, by what its driver and error correction keep.
"""

from pathlib import Path

from jdllm.errors import ConfigError

_TARGETS = Path(__file__).parent / "targets"


def described_targets() -> list[str]:
    """The names of the cards that are described."""
    return sorted(path.stem for path in _TARGETS.glob("*.textproto"))


def description(target: str) -> str:
    """The description of a card; raises `ConfigError` for a name that has none."""
    if target not in described_targets():
        known = ", ".join(described_targets())
        raise ConfigError(f"unknown target {target!r}: expected one of {known}")
    return (_TARGETS / f"{target}.textproto").read_text()
