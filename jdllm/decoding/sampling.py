"""What a request asks of the sampler."""

import dataclasses
from typing import Literal, get_args

from jdllm.errors import RequestError

Remasking = Literal["low_confidence", "random"]
Transfer = Literal["schedule", "threshold", "factor", "entropy_bound", "margin", "adaptive"]
Cache = Literal["none", "prefix", "dual", "selective", "sparse", "head_sparse"]
DreamAlgorithm = Literal["origin", "maskgit_plus", "topk_margin", "entropy", "confidence_threshold"]

_LARGEST = 1e6  # far beyond use, and far from overflow in f32
_DREAM_ONLY = {"alg_temp": 0.0, "top_p": None, "top_k": None, "quota": "row"}

_NOT_ADAPTIVE = {
    "cfg_scale": (0.0, "has no classifier-free guidance"),
    "cache": ("none", "evaluates whole sequences"),
    "block_length": (None, "has no blocks"),
    "remasking": ("low_confidence", "goes from left to right"),
    "confidence_eos_eot_inf": (None, "goes from left to right"),
    "prompt_masks": ("error", "does not fill masks in the prompt (infill does)"),
}
"""What adaptive parallel decoding has not: each option's default, and why."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is denoised. The defaults are the official LLaDA sampler's behaviour (exact in f32
    at temperature 0: every token equals the official code's), except that `early_stop` is on.

    Lengths
    - `gen_length` (128): tokens to generate after the prompt.
    - `steps` (`None`: `gen_length`): denoising steps in all; a multiple of the number of blocks. Rules that
      commit by confidence ("threshold", "factor", "entropy_bound") or "adaptive" take as many as they need.
    - `block_length` (`None`: `gen_length`): length of the blocks that are finished from left to right;
      divides `gen_length`.
    - `early_stop` (True): stop after the block in which the text ends, and cut `token_ids` after the first
      end-of-sequence or end-of-turn id. The kept text is that of the full run (quirk Q7), because a block
      cannot change once it is finished. False runs every block and returns all `gen_length` ids.

    Tokens
    - `temperature` (0.0): 0 takes the argmax, otherwise tokens are drawn from softmax(logits / temperature)
      by Gumbel noise. LLaDA's confidence is that of the clean logits either way, Dream's (`alg`) that of the
      tempered ones.
    - `cfg_scale` (0.0): classifier-free guidance; logits = u + (cfg_scale + 1)(c - u), where u sees the
      prompt masked. Doubles the rows of a step. Works with prompts of any length, padded or not (the
      official function fails without an explicit attention mask, quirk Q2).
    - `seed` (0): of all random draws of this request, 64 bits. The same seed gives the same tokens in any
      batch. Uniforms lie strictly inside (0, 1), where the official code may draw 0 (quirk Q5).
    - `logits_eos_inf` (False): never choose the end-of-sequence id.
    - `undefined_tokens` (`None`): "official" may choose the mask id and ids that the tokenizer does not
      define, as the published code may; "banned" removes them from every distribution (quirk Q12). `None`
      is "official" for the published LLaDA and Dream samplers and "banned" for the other transfer rules.

    Order
    - `transfer` ("schedule"): which tokens a step commits. "schedule": LLaDA's quota of the surest ones;
      "threshold": all at least as sure as `threshold`, and the surest (Fast-dLLM); "factor": as many as their
      number justifies by `factor` (Fast-dLLM); "entropy_bound": the lowest entropies while those before sum
      to at most `entropy_bound`; "margin": the schedule, ordered by the margin of the best over the
      second-best probability; "adaptive": from left to right, as far as an autoregressive verifier goes along
      (below).
    - `threshold` (0.9), `threshold_strict` (False): confidence to reach, or to exceed where strict (the
      published samplers differ, quirk Q11).
    - `factor` (1.0), `factor_end` ("official"): slope of the factor rule. The published loop overlooks a
      failure at its very last row (quirk Q8); "fixed" does not.
    - `entropy_bound` (0.1): nats.
    - `remasking` ("low_confidence"): what orders the tokens; "random" draws the order.
    - `confidence_eos_eot_inf` (`None`): commit end ids as late as possible. "official" reproduces the
      published behaviour: the end ids leave the softmax after the argmax, so a position that holds one has
      confidence 0 and all others gain; with a temperature only the end-of-turn id is affected (quirk Q1).
      "fixed" leaves all other confidences as they are and ranks positions that hold either id last.
    - `confidence_dtype` ("float32"): "model" rounds confidences to the dtype of the weights as the official
      code does; in bfloat16 many then tie, and ties go to the lowest position (quirk Q4). The two are the
      same for f32 weights.

    Cache
    - `cache` ("none"): "none" evaluates the whole sequence in every step and is exact. All others are
      approximate: a refresh stores keys and values, and until the next one only the remaining rows are
      evaluated. "prefix": what is left of the block; "dual": what is outside it (Fast-dLLM); "selective": the
      prompt and what is decoded (dKV-Cache); "sparse": of what is outside the block the share `retention`
      that the block attends to most (Sparse-dLLM); "head_sparse": the same for each key-value head
      (dLLM-Serve).
    - `retention` (0.5): share of the rows that the sparse policies keep.
    - `pool_kernel` (3): odd width of the max pool over their scores, 1 for none.
    - `refresh_delay` (`None`: 1 for sparse, head_sparse and selective, else 0): step of a block, counted from
      0, that refreshes; those before it evaluate everything.
    - `refresh_interval` (`None`: 8 for selective, else never): further refreshes, at the multiples of it.
    - `official_forcing` (False): with Dream the published cached samplers commit the first token of every
      block in its first step, whatever its confidence, and the steps that reuse do not evaluate the row
      before the block (quirk of Fast-dLLM and Sparse-dLLM). False evaluates that row.

    Adaptive parallel decoding (`transfer` "adaptive"; `LLM` needs a `verifier`)
    - A step drafts the next masked positions and accepts them up to the first where the mixture of both
      models' logits would have chosen another token, but always one. Draft and mixture share their Gumbel
      noise, which the published code forgets with a temperature (quirk Q17). Both models evaluate whole
      sequences; ids beyond the smaller vocabulary are never chosen. With `early_stop` it ends with the step
      that accepts an end id in the generated part.
    - `mixture_weight` (0.5): the diffusion model's share of the mixture; 1 accepts every draft, 0 what the
      verifier would have chosen itself.
    - `max_lookahead` (32): masked positions that a step drafts.

    Dream's published sampler (`transfer` and `remasking` stay at their defaults; blocks need a cache)
    - `alg` (`None`: LLaDA's rules): "origin" commits by chance, "maskgit_plus" by probability, "topk_margin"
      by margin, "entropy" by negative entropy, each by Dream's timetable; "confidence_threshold" is
      Fast-dLLM's rule for Dream: gen_length / steps tokens a step, those below `threshold` put off.
    - `eps` (1e-3): where the timetable ends.
    - `alg_temp` (0.0): above 0, positions are drawn from softmax(confidence / alg_temp).
    - `top_p` (`None`), `top_k` (`None`): filters, applied before the confidence is taken, as published.
    - `quota` ("row"): the timetable counts each request's own masks; "batch" averages them over all such
      requests of the batch, as published (quirk Q18), but never commits more than a row has masks.

    Prompt
    - `prompt_masks` ("error"): what to do with a mask id inside the prompt. "official" fills it as the
      official sampler does: from the first block on, at the expense of the block's own quota, so that
      some masks may be left at the end (quirks Q3, Q6). `LLM.infill` has a cleaner definition.
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
    undefined_tokens: Literal["official", "banned"] | None = None
    transfer: Transfer = "schedule"
    threshold: float = 0.9
    threshold_strict: bool = False
    factor: float = 1.0
    factor_end: Literal["official", "fixed"] = "official"
    entropy_bound: float = 0.1
    alg: DreamAlgorithm | None = None
    alg_temp: float = 0.0
    eps: float = 1e-3
    top_p: float | None = None
    top_k: int | None = None
    quota: Literal["row", "batch"] = "row"
    return_history: bool = False
    cache: Cache = "none"
    retention: float = 0.5
    pool_kernel: int = 3
    refresh_delay: int | None = None
    refresh_interval: int | None = None
    official_forcing: bool = False
    mixture_weight: float = 0.5
    max_lookahead: int = 32

    def __post_init__(self):
        for name in ("gen_length", "steps", "block_length", "top_k", "max_lookahead"):
            value = getattr(self, name)
            if value is None and name not in ("gen_length", "max_lookahead"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RequestError(f"{name} is {value!r}, expected a positive integer")
        for name in ("temperature", "cfg_scale", "alg_temp", "factor", "entropy_bound", "threshold"):
            _in_range(name, getattr(self, name), 0, _LARGEST)
        _in_range("eps", self.eps, 0, 1)
        _in_range("mixture_weight", self.mixture_weight, 0, 1)
        if self.top_p is not None:
            _in_range("top_p", self.top_p, 0, 1)
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                expected = ", ".join(map(repr, allowed))
                raise RequestError(f"{name} is {getattr(self, name)!r}, expected one of {expected}")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise RequestError(f"seed is {self.seed!r}, expected an integer from 0 to 2**64 - 1")
        self._check_cache()
        self._check_adaptive()
        self._check_together()

    @property
    def adaptive(self) -> bool:
        """Whether a verifier decides what is accepted."""
        return self.transfer == "adaptive"

    @property
    def bans_undefined(self) -> bool:
        """Whether the mask id and ids that the tokenizer does not define are kept out."""
        published = self.transfer == "schedule"
        return (self.undefined_tokens or ("official" if published else "banned")) == "banned"

    def _check_cache(self) -> None:
        for name in ("refresh_delay", "refresh_interval"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise RequestError(f"{name} is {value!r}, expected an integer from 0 on")
        _in_range("retention", self.retention, 0, 1)
        if self.retention == 0:
            raise RequestError("retention is 0, expected a number above 0, at most 1")
        if not isinstance(self.pool_kernel, int) or self.pool_kernel < 1 or self.pool_kernel % 2 == 0:
            raise RequestError(f"pool_kernel is {self.pool_kernel!r}, expected an odd positive integer")
        if self.cache == "none":
            return
        if self.cfg_scale > 0:
            raise RequestError(f"cache {self.cache!r} has no classifier-free guidance: set cfg_scale=0")
        if self.prompt_masks != "error":
            raise RequestError(f"cache {self.cache!r} does not fill masks in the prompt: use infill for them")
        if self.quota == "batch":
            raise RequestError(
                f"quota 'batch' counts over requests in step: cache {self.cache!r} has none such"
            )

    def _check_adaptive(self) -> None:
        for name, (default, why) in _NOT_ADAPTIVE.items() if self.adaptive else ():
            if getattr(self, name) != default:
                raise RequestError(
                    f"transfer 'adaptive' {why}: leave {name} at {default!r} (it is {getattr(self, name)!r})"
                )

    def _check_together(self) -> None:
        if self.alg is None:
            for name, default in _DREAM_ONLY.items():
                if getattr(self, name) != default:
                    raise RequestError(f"{name} belongs to Dream's sampler: set alg as well")
            if self.remasking == "random" and self.transfer in ("margin", "entropy_bound"):
                raise RequestError(f"transfer {self.transfer!r} brings its own order: leave remasking alone")
            return
        if self.transfer != "schedule" or self.remasking != "low_confidence":
            raise RequestError(f"alg {self.alg!r} brings its own order: leave transfer and remasking alone")
        if self.cache == "none" and self.block_length not in (None, self.gen_length):
            raise RequestError(f"alg {self.alg!r} has blocks only with a cache: leave block_length alone")


_CHOICES: dict[str, tuple[str | None, ...]] = {
    "remasking": get_args(Remasking),
    "cache": get_args(Cache),
    "transfer": get_args(Transfer),
    "alg": (None, *get_args(DreamAlgorithm)),
    "confidence_eos_eot_inf": (None, "official", "fixed"),
    "prompt_masks": ("error", "official"),
    "confidence_dtype": ("float32", "model"),
    "undefined_tokens": (None, "official", "banned"),
    "factor_end": ("official", "fixed"),
    "quota": ("row", "batch"),
}


def _in_range(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise RequestError(f"{name} is {value!r}, expected a number from {low:g} to {high:g}")
