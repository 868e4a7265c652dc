"""What all requests of a run have in common."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jdllm.arguments import positive
from jdllm.bench.answers import DenoiseStream, Stream, TextStream
from jdllm.bench.workload import steps_of
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
    """The requests of a run, but for their prompts and lengths.

    - `model`, `endpoint`: whom they ask.
    - `stream`: how the answer is streamed, `None` for one in one piece.
    - `gen_length`: the tokens that `steps` of `sampling` are for. A request of another length takes its steps
      in proportion.
    - `sampling`: further fields.
    """

    model: str
    endpoint: Endpoint
    stream: StreamMode | None
    gen_length: int
    sampling: Mapping[str, Any]

    def body(self, prompt: Sequence[int] | str, gen_length: int) -> bytes:
        """The body of one request.

        Arguments:
        - `prompt`: ids for completions, or a text for chat.
        - `gen_length`: tokens that it generates: it does not stop where its text ends.
        """
        asks = (
            {"messages": [{"role": "user", "content": prompt}]}
            if self.endpoint == "chat"
            else {"prompt": prompt}
        )
        fields = {
            "model": self.model,
            **asks,
            "max_tokens": gen_length,
            "ignore_eos": True,
            **self._fields_of(gen_length),
        }
        if self.stream == "text":
            usage = {"include_usage": True, "continuous_usage_stats": True}
            fields |= {"stream": True, "stream_options": usage}
        elif self.stream == "denoise":
            fields |= {"stream": True, "stream_mode": "denoise"}
        return json.dumps(fields).encode()

    def steps(self, gen_length: int) -> int | None:
        """Forward evaluations of a request of so many tokens, where the fields say them."""
        return steps_of(self._fields_of(gen_length))

    def reader(self) -> Stream:
        """What reads a streamed answer."""
        return DenoiseStream() if self.stream == "denoise" else TextStream(self.sampling.get("block_length"))

    def _fields_of(self, gen_length: int) -> dict[str, Any]:
        """The further fields of a request of so many tokens."""
        steps = self.sampling.get("steps")
        if steps is None or gen_length == self.gen_length:
            return dict(self.sampling)
        return {**self.sampling, "steps": steps * gen_length // self.gen_length}


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Raise `RequestError` for fields that the requests of a run have by themselves, and for bad steps."""
    taken = sorted(_RESERVED & sampling.keys())
    if taken:
        raise RequestError(
            f"--sampling has the field '{taken[0]}', which requests of a load have by themselves"
        )
    if sampling.get("steps") is not None:
        positive("'steps' of --sampling", sampling["steps"], RequestError)
