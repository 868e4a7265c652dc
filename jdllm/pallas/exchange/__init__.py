"""Sums over cards, and the rows of all cards, by a kernel that writes into the memory of the other cards."""

from jdllm.pallas.exchange.api import rows_of_all_cards, sum_over_cards
from jdllm.pallas.exchange.layout import memory_bytes
from jdllm.pallas.exchange.memory import addresses_of, described_addresses

__all__ = ["addresses_of", "described_addresses", "memory_bytes", "rows_of_all_cards", "sum_over_cards"]
