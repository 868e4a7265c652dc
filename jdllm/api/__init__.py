"""The HTTP server: OpenAI's API and its own, over one engine."""
