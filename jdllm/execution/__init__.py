"""How layers are run: whole, in chunks, few rows, over a pool of pages, from host memory."""
