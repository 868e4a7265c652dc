"""Answers in the shapes that OpenAI's clients read."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.outputs import CompletionOutput, RequestOutput
from jdllm.prompts import Asked
from jdllm.serving.long_request import LongSpec
from jdllm.serving.spec import RequestSpec

DONE = b"data: [DONE]\n\n"
"""The last event of every stream."""

EVENTS = "text/event-stream"

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or its stream.", "content": {EVENTS: {"schema": {"type": "string"}}}}
}
"""What a route documents whose answer may be a stream."""


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event of JSON, with a name or without."""
    head = b"" if name is None else b"event: %s\n" % name.encode()
    return b"%sdata: %s\n\n" % (head, to_json(data))


def usage(prompt_tokens: int, completion_tokens: int, evaluations: int | None = None) -> dict[str, int]:
    """Tokens that were read and made, and the forward evaluations of the model where they are known."""
    counts = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return counts if evaluations is None else counts | {"forward_evaluations": evaluations}


def infill_usage(
    sequences: Sequence[Sequence[int]], mask_id: int, samples: int, evaluations: int
) -> dict[str, int]:
    """The usage of infillings of `sequences`, so many of each: masks were made, the other tokens read."""
    masks = sum(token == mask_id for sequence in sequences for token in sequence)
    return usage(sum(map(len, sequences)) - masks, samples * masks, evaluations)


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The usage of a finished call; each prompt counts once, whatever its samples."""
    samples = [sample for output in outputs for sample in output.outputs]
    counts = usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(sample.token_ids) for sample in samples),
        sum(sample.nfe for sample in samples),
    )
    cached = [output.num_cached_tokens for output in outputs if output.num_cached_tokens is not None]
    return counts | ({"prompt_tokens_details": {"cached_tokens": sum(cached)}} if cached else {})


def prompt_tokens(asked: Sequence[Asked]) -> int:
    """Tokens of all prompts."""
    return sum(len(one.specs[0].prompt) for one in asked)


class Pieces:
    """Texts of single tokens.

    Arguments:
    - `tokenizer`: of the model, where it has one.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        """The text of a token: special tokens by their names, parts of characters as U+FFFD."""
        if token not in self._known:
            self._known[token] = self._text(token)
        return self._known[token]

    def _text(self, token: int) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode([token]) or self.tokenizer.token(token) or ""


def completion_logprobs(
    pieces: Pieces,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    steps: Sequence[int | None],
    at: int,
) -> dict[str, Any]:
    """Log-probabilities as POST /v1/completions answers them, with the steps that committed the tokens.

    Arguments:
    - `tokens`, `logprobs`, `steps`: of each token; `None` for one that was given.
    - `at`: characters before the first of them.
    """
    texts = [pieces(token) for token in tokens]
    offsets = [at + sum(map(len, texts[:i])) for i in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": list(logprobs),
        "top_logprobs": [None if p is None else {t: p} for t, p in zip(texts, logprobs, strict=True)],
        "text_offset": offsets,
        "committed_in": list(steps),
    }


def chat_logprobs(
    pieces: Pieces,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    steps: Sequence[int | None],
    top: int,
) -> dict[str, Any]:
    """The same as POST /v1/chat/completions answers them; `top`: whether a token is listed as its own."""
    content = []
    for token, logprob, step in zip(tokens, logprobs, steps, strict=True):
        text = pieces(token)
        entry = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        content.append(entry | {"top_logprobs": [dict(entry)] * top, "committed_in": step})
    return {"content": content, "refusal": None}


def prefilled(output: CompletionOutput, spec: RequestSpec, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What came of preparing a long context, where there was one: beside the library's fields `passages`, the
    characters of the context that each selected chunk was cut from."""
    if output.prefilling is None:
        return {}
    told = output.prefilling.to_dict()
    if isinstance(spec, LongSpec) and tokenizer is not None:
        context, spans = spec.long.context.tolist(), output.prefilling.spans
        characters = {at: len(tokenizer.decode(context[:at])) for at in {at for span in spans for at in span}}
        told["passages"] = [[characters[at] for at in span] for span in spans]
    return {"prefilling": told}


def sampled(output: CompletionOutput) -> tuple[list[int], list[float | None], list[int | None]]:
    """Tokens of a sample that reports log-probabilities, these and the steps that committed them."""
    tokens = output.token_ids
    return tokens, output.logprobs or [None] * len(tokens), output.committed_in or [None] * len(tokens)
