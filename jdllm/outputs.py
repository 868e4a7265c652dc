"""What a generation returns."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jdllm.checkpoints.token_text import Decode
from jdllm.prefilling.prefilled import Prefilled
from jdllm.serving.request import Request
from jdllm.serving.timings import Timings


@dataclasses.dataclass(frozen=True, eq=False)
class CompletionOutput:
    """One sample of a request. Equal to another that holds the same result, whatever time it took.

    - `index`: the number of the sample in its request.
    - `text`: the text that `token_ids` add to the prompt, up to the first end id or stop string, without
      special tokens. If words begin with their spaces, so does the text. `None` without a tokenizer.
    - `token_ids`: the generated ids, at most `max_tokens`. With early stop the last id is the id that ends
      the text: the first end-of-sequence, end-of-turn or other stop id, or the id that completes a stop
      string. Without early stop there are `gen_length` ids. For infilling: the whole sequence.
    - `finish_reason`: "stop" if the text ended with nothing masked before its end, else "length". Without
      early stop, only the requested stop strings and ids end a text, not the end ids of the model.
    - `nfe`: forward evaluations of the model; for a causal model the evaluations that gave a token.
    - `timings`: seconds.
    - `history`: int32 `[nfe, length]`, the whole sequence after every step, if requested.
    - `logprobs`, `committed_in`: for each of `token_ids`, if requested: its log-probability in the step that
      committed it, in the distribution of its confidence, and this step; `None` for a given token.
    - `top_logprobs`: for each of `token_ids` the likeliest ids in its place with their log-probabilities, the
      likeliest first, as many as requested; the id of the token comes last if it is not among them. `None`
      for a given token, and without a request.
    - `prefilling`: how the long context of a prompt was prepared, if the prompt had one.
    - `num_cached_tokens`: for a causal model: tokens of the prompt whose keys and values were stored already.
    - `generation_mode`: how the request generated, where it left this to the engine ("auto").
    """

    index: int
    text: str | None
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    nfe: int
    timings: Timings
    history: np.ndarray | None = None
    logprobs: list[float | None] | None = None
    committed_in: list[int | None] | None = None
    top_logprobs: list[dict[int, float] | None] | None = None
    prefilling: Prefilled | None = None
    num_cached_tokens: int | None = None
    generation_mode: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain Python values, ready for JSON; the history as lists."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        history = None if self.history is None else self.history.tolist()
        prefilling = None if self.prefilling is None else self.prefilling.to_dict()
        return {**fields, "timings": self.timings.to_dict(), "history": history, "prefilling": prefilling}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompletionOutput):
            return NotImplemented
        aside = {"timings": None, "prefilling": None, "num_cached_tokens": None}
        mine, theirs = ({**x.to_dict(), **aside} for x in (self, other))
        return mine == theirs and self.prefilling == other.prefilling


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The result of one request.

    - `prompt`: the prompt text, if the prompt was given as text.
    - `prompt_token_ids`: the ids before denoising (for infilling the whole sequence with its masks).
    - `seed`: of its random draws; a fresh seed if the request had `None`.
    - `outputs`: its `n` samples. The first sample gives `text`, `token_ids`, `finish_reason`, `nfe`,
      `timings`, `history`, `logprobs`, `committed_in`, `top_logprobs`, `prefilling`, `num_cached_tokens` and
      `generation_mode`.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    seed: int
    outputs: list[CompletionOutput]

    __hash__ = None  # type: ignore[assignment]  # lists inside

    @property
    def text(self) -> str | None:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        return self.outputs[0].finish_reason

    @property
    def nfe(self) -> int:
        return self.outputs[0].nfe

    @property
    def timings(self) -> Timings:
        return self.outputs[0].timings

    @property
    def history(self) -> np.ndarray | None:
        return self.outputs[0].history

    @property
    def logprobs(self) -> list[float | None] | None:
        return self.outputs[0].logprobs

    @property
    def committed_in(self) -> list[int | None] | None:
        return self.outputs[0].committed_in

    @property
    def top_logprobs(self) -> list[dict[int, float] | None] | None:
        return self.outputs[0].top_logprobs

    @property
    def prefilling(self) -> Prefilled | None:
        return self.outputs[0].prefilling

    @property
    def num_cached_tokens(self) -> int | None:
        return self.outputs[0].num_cached_tokens

    @property
    def generation_mode(self) -> str | None:
        return self.outputs[0].generation_mode

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain Python values, ready for JSON."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, "outputs": [output.to_dict() for output in self.outputs]}

    def to_json(self) -> str:
        """`to_dict` as one line of JSON."""
        return json.dumps(self.to_dict())


def request_output(
    prompt: str | None, seed: int, requests: Sequence[Request], decode: Decode | None
) -> RequestOutput:
    """The result of a prompt, from the finished request of each of its samples; `decode`: ids to text."""
    outputs = [_completion(i, request, decode) for i, request in enumerate(requests)]
    return RequestOutput(prompt, requests[0].prompt.tolist(), seed, outputs)


def _completion(index: int, request: Request, decode: Decode | None) -> CompletionOutput:
    end = request.end_of_text()
    positions = _kept(request, end)
    kept = request.tokens[positions]
    logprobs, steps = request.logprobs[positions].tolist(), request.committed_in[positions].tolist()
    asked, listed = request.sampling.logprobs is not None, request.likeliest[positions]
    return CompletionOutput(
        index=index,
        text=None if decode is None else _text(request, end, decode),
        token_ids=kept.tolist(),
        finish_reason="length" if end is None or _passed_over(request, end) else "stop",
        nfe=request.steps,
        timings=request.timings(),
        history=np.stack(request.history) if request.sampling.return_history else None,
        logprobs=[x if i >= 0 else None for x, i in zip(logprobs, steps, strict=True)] if asked else None,
        committed_in=[i if i >= 0 else None for i in steps] if asked else None,
        top_logprobs=[
            top_of(row, token, logprob) if step >= 0 else None
            for row, token, logprob, step in zip(listed, kept.tolist(), logprobs, steps, strict=True)
        ]
        if request.sampling.listed
        else None,
        prefilling=request.prefilled,
        num_cached_tokens=request.found,
        generation_mode=None if request.way is None else request.way.name,
    )


def generated(request: Request) -> int:
    """How many tokens of the result a finished request has generated."""
    return int(np.count_nonzero(request.committed_in[_kept(request, request.end_of_text())] >= 0))


def _kept(request: Request, end: int | None) -> slice:
    """The positions of the result, up to the token that ends the text."""
    if end is None or not request.sampling.early_stop:
        return request.returned
    return slice(request.returned.start, request.returned.start + end + 1)


def top_of(likeliest: np.ndarray, token: int, logprob: float) -> dict[int, float]:
    """The likeliest ids at one position and their log-probabilities, the chosen token last where it is not
    among them.

    Arguments:
    - `likeliest`: `LISTED` `[listed]`.
    """
    return {i: p for i, p in likeliest.tolist() if p > -math.inf} | {token: logprob}


def _passed_over(request: Request, end: int) -> bool:
    """Whether what ends the text is the model's own end, and all was generated nevertheless."""
    token = int(request.tokens[request.returned][end])
    own = token in request.spec.stop_ids and token not in request.sampling.stop_token_ids
    return own and not request.sampling.early_stop


def _text(request: Request, end: int | None, decode: Decode) -> str:
    """The text up to its end, which is not part of it."""
    before, result = request.tokens[: request.returned.start], request.tokens[request.returned]
    if end is None:
        return decode(result, before)
    if result[end] in request.spec.stop_ids:
        return decode(result[:end], before)
    text = decode(result[: end + 1], before)
    return text[: min(text.find(string) for string in request.sampling.stop if string in text)]
