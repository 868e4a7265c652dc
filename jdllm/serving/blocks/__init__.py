"""Serving block models: whole blocks are stored, and masks are filled in the block behind them."""
