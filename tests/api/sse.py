"""Server-sent events as a client reads them."""

import json
from typing import Any


def events(text: str) -> list[tuple[str | None, Any]]:
    """The name and the JSON of each event; the last one is `[DONE]`, which is checked."""
    found = []
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue  # a comment
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("event"), fields["data"]))
    name, last = found.pop()
    assert (name, last) == (None, "[DONE]")
    return [(name, json.loads(data)) for name, data in found]
