"""Executables: how programs become them, how they are kept, and how arguments reach them."""
