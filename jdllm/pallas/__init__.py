"""Operators with a reference, a portable XLA form and, where measured to pay, a GPU kernel."""
