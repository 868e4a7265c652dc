"""What a generation returns."""

import dataclasses
from typing import Literal

import numpy as np

from jdllm.serving.request import Timings


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The result of one request.

    - `prompt`: the prompt text, where it was given as text.
    - `prompt_token_ids`: the ids that were denoised from (for infilling the whole sequence with its masks).
    - `token_ids`: the generated ids. With early stop they end with the first end-of-sequence or end-of-turn
      id, which is included; without, all `gen_length` ids are there. For infilling: the whole sequence.
    - `text`: `token_ids` up to the first end id, decoded without special tokens; `None` without a tokenizer.
    - `finish_reason`: "stop" where an end id was generated with nothing masked before it, else "length".
    - `nfe`: forward evaluations of the model.
    - `timings`: seconds.
    - `history`: int32 `[nfe, length]`, the whole sequence after every step, where it was asked for.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: Literal["stop", "length"]
    nfe: int
    timings: Timings
    history: np.ndarray | None = None
