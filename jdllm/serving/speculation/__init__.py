"""Serving requests whose model verifies its own drafts: a part drafts a block of each, and verifies it."""
