"""Answers in the shapes that OpenAI's clients read."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.outputs import CompletionOutput, RequestOutput
from jdllm.prompts import AskedPrompt
from jdllm.serving.long.request import LongSpec
from jdllm.serving.spec import RequestSpec

DONE = b"data: [DONE]\n\n"
"""The last event of every stream."""

EVENTS = "text/event-stream"

PING = b": ping\n\n"
"""A comment, which says that a stream is there still; clients pass over it."""

SILENT_SECONDS = 15.0
"""Seconds without an event after which a comment comes."""

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or its stream.", "content": {EVENTS: {}}}
}
"""What a route documents whose answer may be a stream."""


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event of JSON, with a name or without."""
    head = b"" if name is None else b"event: %s\n" % name.encode()
    return b"%sdata: %s\n\n" % (head, to_json(data))


async def kept_alive(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """`events`, and comments while there are none: proxies end connections that are silent for a minute."""
    coming: asyncio.Future[bytes] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(events))
            await asyncio.wait((coming,), timeout=SILENT_SECONDS)
            if not coming.done():
                yield PING
                continue
            told, coming = coming, None
            yield told.result()
    except StopAsyncIteration:
        return
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.wait((coming,))
        await events.aclose()


def usage(prompt_tokens: int, completion_tokens: int, evaluations: int | None = None) -> dict[str, Any]:
    """Tokens that were read and made, and the forward evaluations of the model where they are known. Answers
    are not divided into reasoning and the rest."""
    counts = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    return counts if evaluations is None else counts | {"forward_evaluations": evaluations}


def infill_usage(
    sequences: Sequence[Sequence[int]], mask_id: int, samples: int, evaluations: int
) -> dict[str, Any]:
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


def prompt_tokens(asked: Sequence[AskedPrompt]) -> int:
    """Tokens of all prompts."""
    return sum(len(one.specs[0].prompt) for one in asked)


class Pieces:
    """Texts of single tokens, as they read behind others.

    Arguments:
    - `tokenizer`: of the model, where it has one.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer

    def __call__(self, token: int) -> str:
        """The text of a token: special tokens by their names, parts of characters as U+FFFD."""
        return self.bytes(token).decode(errors="replace")

    def bytes(self, token: int) -> bytes:
        """The bytes of a token; the bytes of all tokens of a text make the text."""
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(token)

    def name(self, token: int) -> str:
        """The text of a token; of a part of a character its bytes, such as `bytes:\\xe2\\x82`."""
        said = self.bytes(token)
        try:
            return said.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in said)

    def offsets(self, spec: RequestSpec, tokens: Sequence[int], text: str | None) -> list[int]:
        """Where in `text`, the answer to a request, each of its tokens begins; tokens behind the text begin
        at its end."""
        if self.tokenizer is None:
            return [0] * len(tokens)
        offsets = self.tokenizer.offsets(tokens, spec.tokens[: spec.returned.start])
        return [min(at, len(text or "")) for at in offsets]


Ranked = Sequence[tuple[int, float]]
"""Tokens that are listed for a place, each with its log-probability; the place's own comes first."""

Tops = Sequence[Mapping[int, float] | None] | None
"""As `CompletionOutput.top_logprobs`."""


def ranked_of(tokens: Sequence[int], logprobs: Sequence[float | None], tops: Tops) -> list[Ranked | None]:
    """For each place its own token and the likeliest ones, and nothing for one without a log-probability."""
    own = _only_own(tokens, logprobs)
    if tops is None:
        return own
    return [one and [*one, *(top or {}).items()] for one, top in zip(own, tops, strict=True)]


def _only_own(tokens: Sequence[int], logprobs: Sequence[float | None]) -> list[Ranked | None]:
    """For each place its own token only, and nothing for one without a log-probability."""
    return [None if p is None else [(token, p)] for token, p in zip(tokens, logprobs, strict=True)]


def _by_name(pieces: Pieces, ranked: Ranked) -> dict[str, float]:
    """Log-probabilities of listed tokens by their names; where two read alike, the later one has its id."""
    found: dict[str, float] = {}
    for token, logprob in dict(ranked).items():
        name = pieces.name(token)
        found[f"token_id:{token}" if name in found else name] = logprob
    return found


def completion_logprobs(
    pieces: Pieces,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    steps: Sequence[int | None],
    offsets: Sequence[int],
    ranked: Sequence[Ranked | None] | None = None,
) -> dict[str, Any]:
    """Log-probabilities as POST /v1/completions answers them, with the steps that committed the tokens.

    Arguments:
    - `tokens`, `logprobs`, `steps`: of each token; `None` for one that was given.
    - `offsets`: where in the text that is returned each of them begins.
    - `ranked`: what is listed for each of them, by default the token itself.
    """
    listed = _only_own(tokens, logprobs) if ranked is None else ranked
    return {
        "tokens": [pieces.name(token) for token in tokens],
        "token_logprobs": list(logprobs),
        "top_logprobs": [None if one is None else _by_name(pieces, one) for one in listed],
        "text_offset": list(offsets),
        "committed_in": list(steps),
    }


def chat_logprobs(
    pieces: Pieces,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    steps: Sequence[int | None],
    top: int,
    tops: Tops = None,
) -> dict[str, Any]:
    """The same as POST /v1/chat/completions answers them.

    Arguments:
    - `top`: how many of the likeliest tokens are listed for each.
    - `tops`: these, at least so many; by default the token itself.
    """

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": pieces.name(token), "logprob": logprob, "bytes": list(pieces.bytes(token))}

    listed = _only_own(tokens, logprobs)
    if tops is not None:
        listed = [None if likeliest is None else [*likeliest.items()] for likeliest in tops]
    content = [
        entry(token, logprob)
        | {"top_logprobs": [entry(*one) for one in (likeliest or ())[:top]], "committed_in": step}
        for token, logprob, step, likeliest in zip(tokens, logprobs, steps, listed, strict=True)
    ]
    return {"content": content, "refusal": None}


def way_of(output: CompletionOutput) -> dict[str, str]:
    """How a request generated, where it left this to the engine."""
    return {} if output.generation_mode is None else {"generation_mode": output.generation_mode}


def prefilled(output: CompletionOutput, spec: RequestSpec, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What came of preparing a long context, where there was one: beside the library's fields `passages`, the
    characters of the context that each selected chunk was cut from."""
    if output.prefilling is None:
        return {}
    told = output.prefilling.to_dict()
    if isinstance(spec, LongSpec) and tokenizer is not None:
        context, spans = spec.long.context, output.prefilling.spans
        characters = [*tokenizer.offsets(context), len(tokenizer.decode(context))]
        told["passages"] = [[characters[at] for at in span] for span in spans]
    return {"prefilling": told}


def sampled(output: CompletionOutput) -> tuple[list[int], list[float | None], list[int | None]]:
    """Tokens of a sample that reports log-probabilities, these and the steps that committed them."""
    tokens = output.token_ids
    return tokens, output.logprobs or [None] * len(tokens), output.committed_in or [None] * len(tokens)
