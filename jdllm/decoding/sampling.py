"""What a request asks of the sampler."""

import dataclasses
import math
from typing import Literal

from jdllm.errors import RequestError

Remasking = Literal["low_confidence", "random"]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is denoised. The defaults are the official LLaDA sampler's behaviour (exact in f32
    at temperature 0: every token equals the official code's), except that `early_stop` is on.

    - `gen_length` (128): tokens to generate after the prompt.
    - `steps` (`None`: `gen_length`): denoising steps in all; a multiple of the number of blocks.
    - `block_length` (`None`: `gen_length`): length of the blocks that are finished from left to right;
      divides `gen_length`.
    - `temperature` (0.0): 0 takes the argmax, otherwise tokens are drawn from softmax(logits / temperature)
      by Gumbel noise. The confidence is that of the clean logits either way.
    - `cfg_scale` (0.0): classifier-free guidance; logits = u + (cfg_scale + 1)(c - u), where u sees the
      prompt masked. Doubles the rows of a step. Works with prompts of any length, padded or not (the
      official function fails without an explicit attention mask, quirk Q2).
    - `remasking` ("low_confidence"): which tokens are committed first; "random" draws the order.
    - `seed` (0): of all random draws of this request, 64 bits. The same seed gives the same tokens in any
      batch. Uniforms lie strictly inside (0, 1), where the official code may draw 0 (quirk Q5).
    - `early_stop` (True): stop after the block in which the text ends, and cut `token_ids` after the first
      end-of-sequence or end-of-turn id. The kept text is that of the full run (quirk Q7), because a block
      cannot change once it is finished. False runs every block like the official code and returns all
      `gen_length` ids.
    - `logits_eos_inf` (False): never choose the end-of-sequence id.
    - `confidence_eos_eot_inf` (`None`): commit end ids as late as possible. "official" reproduces the
      published behaviour: the end ids leave the softmax after the argmax, so a position that holds one has
      confidence 0 and all others gain; with a temperature only the end-of-turn id is affected (quirk Q1).
      "fixed" leaves all other confidences as they are and ranks positions that hold either id last.
    - `prompt_masks` ("error"): what to do with a mask id inside the prompt. "official" fills it as the
      official sampler does: from the first block on, at the expense of the block's own quota, so that
      some masks may be left at the end (quirks Q3, Q6). `LLM.infill` has a cleaner definition.
    - `confidence_dtype` ("float32"): "model" rounds confidences to the dtype of the weights as the official
      code does; in bfloat16 many then tie, and ties go to the lowest position (quirk Q4). The two are the
      same for f32 weights.
    - `return_history` (False): keep the sequence after every step in `RequestOutput.history`.
    """

    gen_length: int = 128
    steps: int | None = None
    block_length: int | None = None
    temperature: float = 0.0
    cfg_scale: float = 0.0
    remasking: Remasking = "low_confidence"
    seed: int = 0
    early_stop: bool = True
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: Literal["official", "fixed"] | None = None
    prompt_masks: Literal["error", "official"] = "error"
    confidence_dtype: Literal["float32", "model"] = "float32"
    return_history: bool = False

    def __post_init__(self):
        for name in ("gen_length", "steps", "block_length"):
            value = getattr(self, name)
            if value is None and name != "gen_length":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RequestError(f"{name} is {value!r}, expected a positive integer")
        for name in ("temperature", "cfg_scale"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise RequestError(f"{name} is {value!r}, expected a finite number of at least 0")
        _one_of("remasking", self.remasking, ("low_confidence", "random"))
        _one_of("confidence_eos_eot_inf", self.confidence_eos_eot_inf, (None, "official", "fixed"))
        _one_of("prompt_masks", self.prompt_masks, ("error", "official"))
        _one_of("confidence_dtype", self.confidence_dtype, ("float32", "model"))
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise RequestError(f"seed is {self.seed!r}, expected an integer from 0 to 2**64 - 1")


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise RequestError(f"{name} is {value!r}, expected one of {', '.join(map(repr, allowed))}")
