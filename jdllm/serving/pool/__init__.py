"""The KV pool: pages of keys and values, who holds them, and what is kept in them."""
