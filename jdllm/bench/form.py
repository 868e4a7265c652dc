"""What all requests of a run have in common."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jdllm.bench.answers import DenoiseStream, Stream, TextStream
from jdllm.errors import RequestError

Endpoint = Literal["completions", "chat"]
StreamMode = Literal["text", "denoise"]

_RESERVED = frozenset(
    {
        *("model", "prompt", "messages", "suffix", "echo", "n", "best_of"),
        *("max_tokens", "max_completion_tokens", "gen_length", "ignore_eos", "early_stop"),
        *("stream", "stream_mode", "stream_options"),
    }
)
"""Fields that are no sampling fields here: options say them, or all requests are alike in them."""


class Form(NamedTuple):
    """The requests of a run, but for their prompts.

    - `model`, `endpoint`: whom they ask.
    - `stream`: how the answer is streamed, `None` for one in one piece.
    - `gen_length`: tokens that each generates: none stops where its text ends.
    - `sampling`: further fields.
    """

    model: str
    endpoint: Endpoint
    stream: StreamMode | None
    gen_length: int
    sampling: Mapping[str, Any]

    def body(self, prompt: Sequence[int] | str) -> bytes:
        """The body of one request, from ids for completions or a text for chat."""
        asks = (
            {"messages": [{"role": "user", "content": prompt}]}
            if self.endpoint == "chat"
            else {"prompt": prompt}
        )
        fields = {
            "model": self.model,
            **asks,
            "max_tokens": self.gen_length,
            "ignore_eos": True,
            **self.sampling,
        }
        if self.stream == "text":
            usage = {"include_usage": True, "continuous_usage_stats": True}
            fields |= {"stream": True, "stream_options": usage}
        elif self.stream == "denoise":
            fields |= {"stream": True, "stream_mode": "denoise"}
        return json.dumps(fields).encode()

    def reader(self) -> Stream:
        """What reads a streamed answer."""
        return DenoiseStream() if self.stream == "denoise" else TextStream(self.sampling.get("block_length"))


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Raise `RequestError` for fields that the requests of a run have by themselves."""
    taken = sorted(_RESERVED & sampling.keys())
    if taken:
        raise RequestError(
            f"--sampling has the field '{taken[0]}', which requests of a load have by themselves"
        )
