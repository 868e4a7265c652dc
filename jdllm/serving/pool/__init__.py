"""The KV pool: pages of keys and values, their holders, and their kept contents."""
