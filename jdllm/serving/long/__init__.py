"""Serving questions over long contexts: stages of preparation before the steps."""
