"""What a request asks of the sampler: one declaration for the library, the command line and any schema."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs, PydanticCustomError

from jdllm.declarations import explain, plain
from jdllm.decoding.prefilling import PrefillingLike
from jdllm.errors import RequestError
from jdllm.pallas.listed import LISTED

Remasking = Literal["low_confidence", "random"]
Transfer = Literal["schedule", "threshold", "factor", "entropy_bound", "margin", "adaptive"]
Cache = Literal["none", "prefix", "dual", "selective", "sparse", "head_sparse"]
DreamAlgorithm = Literal["origin", "maskgit_plus", "topk_margin", "entropy", "confidence_threshold"]

LONGEST = 2**24
"""Positions that a request can ask for: rotary positions are whole numbers in f32 up to here."""

_LARGEST = 1e6  # far beyond use, and far from overflow in f32
_OFFICIAL_TOP_K = 50


def _odd(value: int) -> int:
    if value % 2 == 0:
        raise PydanticCustomError("expected", "an odd positive integer")
    return value


def _tuple(value: object) -> object:
    """A single string, a list or an array as a tuple; nothing as an empty one."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(plain(part) for part in value)
    return () if value is None else (value,)


def _count(value: object) -> object:
    """A switch as vLLM's counts: off is `None`, and on the token itself without others."""
    return value if not isinstance(value, bool) else 0 if value else None


def none_at(*values: int) -> BeforeValidator:
    """Take values by which other software says that nothing is set."""
    return BeforeValidator(lambda value: None if type(value) is int and value in values else value)


_Length = Annotated[int, Field(ge=1, le=LONGEST)]
_Step = Annotated[int, Field(ge=0, le=LONGEST)]
_Scale = Annotated[float, Field(ge=0, le=_LARGEST)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Factor = Annotated[float, Field(ge=1 / _LARGEST, le=_LARGEST)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _Option(NamedTuple):
    """A parameter that only some samplers use.

    - `default`: what it is where it is `None`.
    - `users`: the values of other parameters that use it, any of them.
    """

    default: Any
    users: Mapping[str, tuple[str, ...]]


_BY_THRESHOLD = {"transfer": ("threshold",), "alg": ("confidence_threshold",)}
_BY_FACTOR = {"transfer": ("factor",)}
_ADAPTIVE = {"transfer": ("adaptive",)}
BY_TIMETABLE = ("origin", "maskgit_plus", "topk_margin", "entropy")  # Dream's own algorithms
_SCORED = {"cache": ("sparse", "head_sparse")}
_CACHED = {"cache": ("prefix", "dual", "selective", "sparse", "head_sparse")}

_OPTIONS: dict[str, _Option] = {
    "threshold": _Option(0.9, _BY_THRESHOLD),
    "threshold_strict": _Option(False, _BY_THRESHOLD),
    "factor": _Option(1.0, _BY_FACTOR),
    "factor_end": _Option("official", _BY_FACTOR),
    "entropy_bound": _Option(0.1, {"transfer": ("entropy_bound",)}),
    "alg_temp": _Option(0.0, {"alg": (*BY_TIMETABLE[1:], "confidence_threshold")}),
    "eps": _Option(1e-3, {"alg": BY_TIMETABLE}),
    "quota": _Option("row", {"alg": BY_TIMETABLE[1:]}),
    "retention": _Option(0.5, _SCORED),
    "pool_kernel": _Option(3, _SCORED),
    "refresh_delay": _Option(None, _CACHED),
    "refresh_interval": _Option(None, _CACHED),
    "official_forcing": _Option(False, _CACHED),
    "mixture_weight": _Option(0.5, _ADAPTIVE),
    "max_lookahead": _Option(32, _ADAPTIVE),
}

_NOT_ADAPTIVE = {
    "cfg_scale": (0.0, "has no classifier-free guidance"),
    "cache": ("none", "evaluates whole sequences"),
    "block_length": (None, "has no blocks"),
    "remasking": ("low_confidence", "goes from left to right"),
    "confidence_eos_eot_inf": (None, "goes from left to right"),
    "prompt_masks": ("error", "does not fill masks in the prompt (infill does)"),
}
"""What adaptive parallel decoding has not: each option's default, and why."""


_NOT_PREFILLED = {
    "cache": ("none", "is a cache of its own"),
    "cfg_scale": (0.0, "has no classifier-free guidance"),
    "alg": (None, "commits by transfer rules"),
    "prompt_masks": ("error", "does not fill masks in the prompt"),
}
"""What requests over long contexts have not: each option's default, and why."""

FILTERS = {"top_p": 1, "top_k": None, "min_p": 0}
"""The filters of a distribution, with the value that lets everything pass."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
class SamplingParams:
    """How one request is generated. The defaults are the official LLaDA sampler's behaviour (exact in f32
    at temperature 0: every token equals the official code's), except that `early_stop` is on.

    Every value is checked when it is made; what is wrong raises `RequestError`. NumPy's scalars are taken as
    Python's; booleans are no numbers, and numbers no booleans. A parameter that belongs to one rule or cache
    is `None` unless it is set, which stands for the default given below, and refused where nothing uses it.
    What clients send by habit is taken as they mean it: filters that nothing draws from change nothing.

    Lengths
    - `gen_length` (128): tokens to generate after the prompt.
    - `max_tokens` (`None`): tokens to return at most; -1 is `None`. Where `gen_length` is left out, it is
      this number, rounded up to whole blocks; elsewhere it may not exceed `gen_length`.
    - `steps` (`None`: `gen_length`): denoising steps in all; a multiple of the number of blocks. Rules that
      commit by confidence ("threshold", "factor", "entropy_bound") or "adaptive" take as many as they need.
    - `block_length` (`None`: `gen_length`): length of the blocks that are finished from left to right;
      divides `gen_length`.
    - `early_stop` (True): stop after the block in which the text ends, and cut `token_ids` after the first
      end-of-sequence or end-of-turn id. The kept text is that of the full run (quirk Q7), because a block
      cannot change once it is finished. False runs every block and returns all `gen_length` ids.
    - `stop` (none), `stop_token_ids` (none): texts and ids that end the answer, a single one or a list. A
      text has to lie within the answer, across tokens or not: what begins in the prompt does not count.

    Answers
    - `n` (1): samples of each prompt. Sample i has the key (`seed`, i), sample 0 thus the plain seed.
    - `logprobs` (`None`): report the log-probability of each token at the step that committed it, that step,
      and so many of the likeliest ids of its distribution, up to 20, as in vLLM. True is 0: the token itself
      without others; False is `None`: nothing.

    Tokens
    - `temperature` (0.0): 0 takes the argmax, otherwise tokens are drawn from softmax(logits / temperature)
      by Gumbel noise. LLaDA's confidence is that of the clean logits either way, Dream's (`alg`) that of the
      tempered ones.
    - `top_p`, `top_k`, `min_p` (`None`): keep the likeliest ids only: the fewest that together exceed
      `top_p`, at most `top_k` of them, and those at least `min_p` times as likely as the likeliest, by
      softmax(logits / temperature). This is the published order of Dream, and also LLaDA's, whose sampler
      has no filters. Causal models follow transformers: temperature, then `top_k`, then `top_p`, for which
      the fewest that reach it among these `top_k` are kept, then `min_p`. Ids that are as likely as the last
      that is kept stay too. The filters say what tokens are drawn from: without a temperature or `alg`
      they change nothing. `top_k` -1 and 0 are `None`. LLaDA's confidence stays that of the clean logits;
      with `alg` they are applied before the confidence is taken, as published.
    - `cfg_scale` (0.0): classifier-free guidance; logits = u + (cfg_scale + 1)(c - u), where u sees the
      prompt masked. Doubles the rows of a step. Works with prompts of any length, padded or not (the
      official function fails without an explicit attention mask, quirk Q2).
    - `seed` (0): of all random draws of this request, 64 bits; `None` or -1 draws one for each request. The
      same seed gives the same tokens in any batch. Uniforms lie strictly inside (0, 1), where the official
      code may draw 0 (quirk Q5).
    - `logits_eos_inf` (False): never choose the end-of-sequence id.
    - `undefined_tokens` (`None`): "official" may choose the mask id and ids that the tokenizer does not
      define, as the published code may; "banned" removes them from every distribution (quirk Q12). `None`
      is "official" for the published LLaDA and Dream samplers and for causal models, and "banned" for the
      other transfer rules.

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
    - `retention` (0.5): share of the rows that the sparse policies keep, at least one row.
    - `pool_kernel` (3): odd width of the max pool over their scores, 1 for none.
    - `refresh_delay` (`None`: 1 for sparse, head_sparse and selective, else 0): step of a block, counted from
      0, that refreshes; those before it evaluate everything.
    - `refresh_interval` (`None`: 8 for selective, else 0, which is never): further
      refreshes, at the multiples of it.
    - `official_forcing` (False): with Dream the published cached samplers commit the first token of every
      block in its first step, whatever its confidence, and the steps that reuse do not evaluate the row
      before the block (quirk Q30). False evaluates that row.

    Adaptive parallel decoding (`transfer` "adaptive"; `LLM` needs a `verifier`)
    - A step drafts the next masked positions and accepts them up to the first where the mixture of both
      models' logits would have chosen another token, but always one. Draft and mixture share their Gumbel
      noise, which the published code forgets with a temperature (quirk Q17). Both models evaluate whole
      sequences; ids beyond the smaller vocabulary are never chosen. With `early_stop` it ends with the step
      that accepts an end id in the generated part.
    - `mixture_weight` (0.5): the diffusion model's share of the mixture; 1 accepts every draft, 0 what the
      verifier would have chosen itself.
    - `max_lookahead` (32): masked positions that a step drafts.

    Dream's published sampler (`transfer` and `remasking` stay at their defaults; blocks need a cache).
    `official` makes the published call, whose `top_k` is 50.
    - `alg` (`None`: LLaDA's rules): "origin" commits by chance, "maskgit_plus" by probability, "topk_margin"
      by margin, "entropy" by negative entropy, each by Dream's timetable; "confidence_threshold" is
      Fast-dLLM's rule for Dream: gen_length / steps tokens a step, those below `threshold` put off.
    - `eps` (1e-3): where the timetable ends.
    - `alg_temp` (0.0): above 0, positions are drawn from softmax(confidence / alg_temp).
    - `quota` ("row"): the timetable counts each request's own masks; "batch" averages them over all such
      requests of the batch, as published (quirk Q18), but never commits more than a row has masks.

    Prompt
    - `prompt_masks` ("error"): what to do with a mask id inside the prompt. "official" fills it as the
      official sampler does: from the first block on, at the expense of the block's own quota, so that
      some masks may be left at the end (quirks Q3, Q6). `LLM.infill` has a cleaner definition.
    - `prefilling` (`None`): how a long context is prepared, where the prompt has one: `Prefilling`, or the
      name of a preset ("dream", "dream_sparse", "ultrallada", "ultrallada_sparse", "official_sparse",
      "official").
      The answer is denoised against what is stored, in blocks of `block_length`, the last perhaps shorter.
      With shifted logits a block's first step commits its first token, whatever its confidence.
    - `return_history` (False): keep the sequence after every step in `RequestOutput.history`.

    Causal models (Llama, Mistral, Qwen2, Qwen3), which generate one token after another
    - `repetition_penalty` (1.0): of causal models only: logits of ids that occur in the prompt or in what was
      generated are divided by it where positive, else multiplied. This comes before temperature and filters,
      as in transformers and vLLM, and log-probabilities are measured after it.
    - `presence_penalty` (0.0), `frequency_penalty` (0.0): of causal models only, -2 to 2: what is taken from
      the logit of each id that was generated, once, and as often as it was. The prompt does not count. They
      come behind `repetition_penalty` and before temperature and filters, and log-probabilities are measured
      after them, too.
    - Beside these they take `gen_length`, `max_tokens`, `early_stop`, `stop`, `stop_token_ids`, `n`,
      `logprobs`, `temperature`, `top_p`, `top_k`, `min_p`, `seed`, `logits_eos_inf`, `undefined_tokens` and
      `return_history`. All other fields are for denoising: a request that changes one is refused.
    """

    max_tokens: Annotated[_Length | None, none_at(-1)] = None
    steps: _Length | None = None
    block_length: _Length | None = None
    gen_length: _Length = 128
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_tuple)] = ()
    stop_token_ids: Annotated[tuple[_TokenId, ...], BeforeValidator(_tuple)] = ()
    early_stop: bool = True
    logprobs: Annotated[int | None, Field(ge=0, le=LISTED), BeforeValidator(_count)] = None
    temperature: _Scale = 0.0
    top_p: _Share | None = None
    top_k: Annotated[Annotated[int, Field(ge=1, lt=2**31)] | None, none_at(-1, 0)] = None
    min_p: _Share | None = None
    repetition_penalty: _Factor = 1.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    cfg_scale: _Scale = 0.0
    remasking: Remasking = "low_confidence"
    seed: Annotated[Annotated[int, Field(ge=0, lt=2**64)] | None, none_at(-1)] = 0
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: Literal["official", "fixed"] | None = None
    prompt_masks: Literal["error", "official"] = "error"
    confidence_dtype: Literal["float32", "model"] = "float32"
    undefined_tokens: Literal["official", "banned"] | None = None
    transfer: Transfer = "schedule"
    threshold: _Scale | None = None
    threshold_strict: bool | None = None
    factor: _Scale | None = None
    factor_end: Literal["official", "fixed"] | None = None
    entropy_bound: _Scale | None = None
    alg: DreamAlgorithm | None = None
    alg_temp: _Scale | None = None
    eps: _Share | None = None
    quota: Literal["row", "batch"] | None = None
    return_history: bool = False
    cache: Cache = "none"
    retention: Annotated[float, Field(gt=0, le=1)] | None = None
    pool_kernel: Annotated[int, Field(ge=1, le=LONGEST), AfterValidator(_odd)] | None = None
    refresh_delay: _Step | None = None
    refresh_interval: _Step | None = None
    official_forcing: bool | None = None
    mixture_weight: _Share | None = None
    max_lookahead: _Length | None = None
    prefilling: PrefillingLike = None

    @model_validator(mode="wrap")
    @classmethod
    def _explained(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            made = handler(data)
        except ValidationError as error:
            raise RequestError(explain(error, cls)) from None
        given = (data.kwargs or {}) if isinstance(data, ArgsKwargs) else data
        if made.max_tokens is not None and "gen_length" not in given:
            block = made.block_length or 1
            object.__setattr__(made, "gen_length", -(-made.max_tokens // block) * block)
        if made.max_tokens is not None and made.max_tokens > made.gen_length:
            raise RequestError(
                f"max_tokens is {made.max_tokens}, more than gen_length {made.gen_length}:"
                " leave gen_length out"
            )
        return made

    @field_validator("*", mode="before")
    @classmethod
    def _plain_scalar(cls, value: object) -> object:
        return plain(value)

    def __post_init__(self):
        self._check_effect()
        self._check_prefilling()
        self._check_cache()
        self._check_adaptive()
        self._check_together()

    @classmethod
    def official(cls, alg: DreamAlgorithm = "origin", **options: Any) -> Self:
        """Dream's published call with its defaults, `top_k` 50 included.

        That number stands in no file of Dream's: the call builds its generation configuration from the
        model's, which in transformers 4.46 carries `top_k` 50 where nobody set it, so that the published
        sampler keeps 50 logits before it takes any confidence. Without it several confidences, and thus
        orders and tokens, differ.

        Arguments:
        - `alg`: Dream's algorithm, by default the published default.
        - `options`: other fields; they replace the preset's.
        """
        return cls(**{"alg": alg, "top_k": _OFFICIAL_TOP_K, **options})

    def changed(self, **options: Any) -> Self:
        """A copy with other values.

        Fields of this one that lose their effect by it go back to their defaults, and `gen_length` follows
        a new `max_tokens`. Raises `RequestError` as the class itself does.
        """
        kept = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if "max_tokens" in options:
            del kept["gen_length"]
        together = kept | options
        idle = [name for name in without_effect(together) if name not in options]
        return type(self)(**{name: value for name, value in together.items() if name not in idle})

    def effective(self, name: str) -> Any:
        """The value of a field, or its default where it is `None`."""
        value = getattr(self, name)
        return _OPTIONS[name].default if value is None else value

    @property
    def adaptive(self) -> bool:
        """Whether a verifier decides what is accepted."""
        return self.transfer == "adaptive"

    @property
    def filters(self) -> dict[str, Any]:
        """`top_p`, `top_k` and `min_p` as far as they take anything away from what is drawn."""
        given = {name: getattr(self, name) for name in FILTERS}
        drawn = is_drawn(vars(self))
        return {name: value for name, value in given.items() if drawn and value not in (None, FILTERS[name])}

    @property
    def filtered(self) -> bool:
        """Whether tokens are drawn from less than the whole distribution."""
        return bool(self.filters)

    @property
    def listed(self) -> int:
        """How many of the likeliest ids are reported for each token."""
        return self.logprobs or 0

    @property
    def bans_undefined(self) -> bool:
        """Whether the mask id and ids that the tokenizer does not define are kept out."""
        published = self.transfer == "schedule"
        return (self.undefined_tokens or ("official" if published else "banned")) == "banned"

    def _check_effect(self) -> None:
        for name in without_effect(vars(self)):
            users = _OPTIONS[name].users.items()
            needs = " or ".join(f"{user} {_listed(values)}" for user, values in users)
            raise RequestError(f"{name} has no effect here: it needs {needs}")

    def _check_cache(self) -> None:
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

    def _check_prefilling(self) -> None:
        if self.prefilling and self.adaptive:
            raise RequestError("prefilling has no verifier: choose another transfer than 'adaptive'")
        for name, (default, why) in _NOT_PREFILLED.items() if self.prefilling else ():
            if getattr(self, name) != default:
                raise RequestError(
                    f"prefilling {why}: leave {name} at {default!r} (it is {getattr(self, name)!r})"
                )

    def _check_adaptive(self) -> None:
        for name, (default, why) in _NOT_ADAPTIVE.items() if self.adaptive else ():
            if getattr(self, name) != default:
                raise RequestError(
                    f"transfer 'adaptive' {why}: leave {name} at {default!r} (it is {getattr(self, name)!r})"
                )
        for name, value in self.filters.items() if self.adaptive else ():
            raise RequestError(
                "transfer 'adaptive' draws from whole distributions:"
                f" leave {name} at {FILTERS[name]!r} (it is {value!r})"
            )

    def _check_together(self) -> None:
        if self.alg is None:
            if self.remasking == "random" and self.transfer in ("margin", "entropy_bound"):
                raise RequestError(f"transfer {self.transfer!r} brings its own order: leave remasking alone")
            return
        if self.transfer != "schedule" or self.remasking != "low_confidence":
            raise RequestError(f"alg {self.alg!r} brings its own order: leave transfer and remasking alone")
        if self.cache == "none" and self.block_length not in (None, self.gen_length):
            raise RequestError(f"alg {self.alg!r} has blocks only with a cache: leave block_length alone")


def without_effect(fields: Mapping[str, Any]) -> list[str]:
    """The parameters among `fields` that belong to a rule or a cache, are set, and that nothing uses."""
    return [
        name
        for name, option in _OPTIONS.items()
        if fields[name] is not None
        and not any(fields[user] in values for user, values in option.users.items())
    ]


def is_drawn(fields: Mapping[str, Any]) -> bool:
    """Whether tokens are drawn from distributions that filters could narrow."""
    return fields["temperature"] != 0 or fields["alg"] is not None


def _listed(values: tuple[str, ...]) -> str:
    return " or ".join(map(repr, values))
