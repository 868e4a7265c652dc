"""What a generation returns."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from jdllm.serving.request import Request, Timings

Decode = Callable[[Sequence[int]], str]


@dataclasses.dataclass(frozen=True, eq=False)
class CompletionOutput:
    """One sample of a request. Equal to another that holds the same result, whatever time it took.

    - `index`: which of the request's samples it is.
    - `text`: `token_ids` up to the first end id, decoded without special tokens; `None` without a tokenizer.
    - `token_ids`: the generated ids. With early stop they end with the first end-of-sequence or end-of-turn
      id, which is included; without, all `gen_length` ids are there. For infilling: the whole sequence.
    - `finish_reason`: "stop" where an end id was generated with nothing masked before it, else "length".
    - `nfe`: forward evaluations of the model.
    - `timings`: seconds.
    - `history`: int32 `[nfe, length]`, the whole sequence after every step, where it was asked for.
    """

    index: int
    text: str | None
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    nfe: int
    timings: Timings
    history: np.ndarray | None = None

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain Python values, ready for JSON; the history as lists."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        history = None if self.history is None else self.history.tolist()
        return {**fields, "timings": self.timings.to_dict(), "history": history}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompletionOutput):
            return NotImplemented
        mine, theirs = ({**x.to_dict(), "timings": None} for x in (self, other))
        return mine == theirs


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The result of one request.

    - `prompt`: the prompt text, where it was given as text.
    - `prompt_token_ids`: the ids that were denoised from (for infilling the whole sequence with its masks).
    - `seed`: of its random draws.
    - `outputs`: its samples. `text`, `token_ids`, `finish_reason`, `nfe`, `timings` and `history` are those
      of the first.
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

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain Python values, ready for JSON."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, "outputs": [output.to_dict() for output in self.outputs]}

    def to_json(self) -> str:
        """`to_dict` as one line of JSON."""
        return json.dumps(self.to_dict())


def completion(request: Request, index: int, decode: Decode | None) -> CompletionOutput:
    """The result of a finished request, sample `index` of its prompt; `decode`: ids to text."""
    end = request.end_of_text()
    result = request.tokens[request.returned]
    kept = result if end is None or not request.sampling.early_stop else result[: end + 1]
    return CompletionOutput(
        index=index,
        text=None if decode is None else decode(result[:end].tolist()),
        token_ids=kept.tolist(),
        finish_reason="length" if end is None else "stop",
        nfe=request.steps,
        timings=request.timings(),
        history=np.stack(request.history) if request.sampling.return_history else None,
    )
