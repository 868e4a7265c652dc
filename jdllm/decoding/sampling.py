"""What a request asks of the sampler: one declaration for the library, the command line and any schema."""

import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from jdllm.declarations import explain, listed, plain
from jdllm.decoding.control_kinds import AllowedIds, BadWords, LogitBias, TokenId
from jdllm.decoding.kinds import LARGEST, POST_STEPS, Length, OneOf, PostSteps, Scale, Share, Step
from jdllm.decoding.prefilling import PrefillingLike
from jdllm.decoding.registry import RULES, cache_names, options, rule_names
from jdllm.decoding.sampling_checks import FILTERS, check_together, excluded, is_drawn, without_effect
from jdllm.decoding.sampling_options import taken_apart, with_options
from jdllm.errors import RequestError
from jdllm.pallas.listed import LISTED
from jdllm.structured.structure import StructureLike

Remasking = Literal["low_confidence", "random"]
Transfer = Annotated[str, OneOf(functools.partial(rule_names, "transfer"))]
DreamAlgorithm = Annotated[str, OneOf(functools.partial(rule_names, "alg"))]
Cache = Annotated[str, OneOf(cache_names)]
GenerationMode = Literal["autoregressive", "diffusion", "bidirectional", "self_speculation", "auto"]

_OFFICIAL_TOP_K = 50


def _tuple(value: object) -> object:
    """A single string, a list or an array as a tuple; nothing as an empty one."""
    value = listed(value)
    if isinstance(value, list | tuple):
        return tuple(plain(part) for part in value)
    return () if value is None else (value,)


def _count(value: object) -> object:
    """A switch as vLLM's counts: off is `None`, and on the token itself without others."""
    return value if not isinstance(value, bool) else 0 if value else None


def none_at(*values: int) -> BeforeValidator:
    """Take values by which other software says that nothing is set."""
    return BeforeValidator(lambda value: None if type(value) is int and value in values else value)


_Factor = Annotated[float, Field(ge=1 / LARGEST, le=LARGEST)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
@with_options
class SamplingParams:
    """How one request is generated. The defaults are the behaviour of the official LLaDA sampler (exact in
    f32 at temperature 0: every token equals the token of the official code), except that `early_stop` is on.

    Every value is checked when it is made; a wrong value raises `RequestError`. NumPy's scalars count as
    Python's; booleans are no numbers, and numbers no booleans. A parameter of one rule or cache is `None` for
    the default given below, and is refused if no rule or cache of the request uses it. Harmless habits of
    clients are accepted: filters without any draw change nothing.

    Lengths
    - `gen_length` (128): tokens to generate after the prompt.
    - `max_tokens` (`None`): tokens to return at most; -1 is `None`. Without `gen_length`, the request
      generates this number, rounded up to whole blocks; otherwise it may not exceed `gen_length`.
    - `steps` (`None`: `gen_length`): denoising steps in all; a multiple of the number of blocks. Rules that
      commit by confidence ("threshold", "falling_threshold", "factor", "entropy_bound") or "adaptive" take as
      many as they need.
    - `block_length` (`None`: `gen_length`): length of the blocks that are finished from left to right;
      divides `gen_length`.
    - `small_block_length` (`None`: `block_length`): for block models only: how many positions of a block are
      filled before the next ones (Fast-dLLM v2); divides the block length. Small blocks share `steps`.
    - `early_stop` (True): stop after the block in which the text ends, and cut `token_ids` after the first
      end-of-sequence or end-of-turn id. The full run has the same text up to this id (quirk Q7), because a
      finished block cannot change. False runs every block and returns all `gen_length` ids.
    - `stop_in_block` (False): for block models only: `early_stop` ends with the step that completes the text,
      which may leave masks in its block (LLaDA2.0's `eos_early_stop`). The kept text is the same.
    - `editing_threshold` (`None`: no editing): for block models only: a step also replaces tokens of its
      block that earlier steps filled, where the step chooses another token with a probability above this
      (LLaDA2.1). A block is final when it is finished. Other software names it `edit_threshold`.
    - `max_post_steps` (16): with `editing_threshold`: steps that a block may take after its last mask is
      filled. A block is finished before, if such a step replaces nothing. 0 edits beside filling only.
    - `penalty_lambda` (0.0): with `editing_threshold`: taken from the logit of the token that stands to the
      left in the block, before anything is chosen or measured (SGLang's `JointThreshold`).
    - `stop` (none), `stop_token_ids` (none): texts and ids that end the answer, one or a list. A text must
      lie within the answer, across tokens or not: a text that begins in the prompt does not count.
    - `min_tokens` (0): in so many first positions of the answer no id is chosen that ends the text, of the
      model's or of `stop_token_ids`. Texts of `stop` may still end it there.

    Answers
    - `n` (1): samples of each prompt. Sample i has the key (`seed`, i), so sample 0 has the plain seed.
    - `logprobs` (`None`): report the log-probability of each token at the step that committed it, this step,
      and as many of the likeliest ids of its distribution, up to 20, as in vLLM. True is 0: the token itself
      without other ids; False is `None`: nothing.

    Tokens
    - `temperature` (0.0): 0 takes the argmax; otherwise tokens are drawn from softmax(logits / temperature)
      by Gumbel noise. LLaDA measures its confidence on the clean logits either way, Dream (`alg`) on the
      tempered logits.
    - `top_p`, `top_k`, `min_p` (`None`): keep only the likeliest ids: the fewest that together exceed
      `top_p`, at most `top_k` ids, and ids at least `min_p` times as likely as the likeliest, by
      softmax(logits / temperature). This is the published order of Dream. LLaDA's sampler has no filters and
      gets the same order here. Causal models follow transformers: temperature, then `top_k`, then `top_p`
      (the fewest of these `top_k` ids that reach it), then `min_p`. Ids that are as likely as the last kept
      id stay too. Filters matter for draws only: without a temperature or `alg` they change nothing. `top_k`
      -1 and 0 are `None`. LLaDA still measures its confidence on the clean logits; with `alg` the filters
      come before the confidence, as published.
    - `cfg_scale` (0.0): classifier-free guidance; logits = u + (cfg_scale + 1)(c - u), where u sees the
      prompt masked. Doubles the rows of a step. Works with prompts of any length, padded or not (the
      official function fails without an explicit attention mask, quirk Q2).
    - `seed` (0): of all random draws of this request, 64 bits; `None` or -1 draws a seed for each request.
      The same seed gives the same tokens in any batch. Uniforms lie strictly inside (0, 1), where the
      official code may draw 0 (quirk Q5).
    - `logit_bias` (`None`): numbers from -100 to 100 that are added to the logits of ids, as {id: number}.
    - `allowed_token_ids` (`None`: all): the only ids that may be chosen. Ids that end the text are allowed
      only where they are among these.
    - `bad_words` (none): words that the answer may not have: one text, or a list of texts and lists of ids. A
      text is banned as it stands and behind a space. Words of several tokens are for causal models.
    - `structure` (`None`: any): the form of the answer: `Structure`, or its field in a mapping:
      "json_schema", "json_object", "regex", "grammar" or "choice". What ends with "stop" has this form. What
      ends with "length" is the beginning of a text that has it. A model that denoises then commits one token
      in each step, from left to right. Block models have no forms.
    - `logits_eos_inf` (False): never choose the end-of-sequence id.
    - `undefined_tokens` (`None`): "official" may choose the mask id and ids that the tokenizer does not
      define, as the published code may; "banned" removes them from every distribution (quirk Q12). `None`
      is "official" for the published LLaDA and Dream samplers and for causal models, and "banned" for the
      other transfer rules.

    Order
    - `transfer` ("schedule"): which tokens a step commits. {transfer}
    {options of transfer}
    - `remasking` ("low_confidence"): order of the tokens; "random" draws the order.
    - `confidence_eos_eot_inf` (`None`): commit end ids as late as possible. "official" reproduces the
      published behaviour: the end ids leave the softmax after the argmax, so a position that holds one has
      confidence 0 and all others gain; with a temperature only the end-of-turn id is affected (quirk Q1).
      "fixed" leaves all other confidences as they are and ranks positions that hold either id last.
    - `confidence_dtype` ("float32"): "model" rounds confidences to the dtype of the weights, as the official
      code does; in bfloat16 many then tie, and ties go to the lowest position (quirk Q4). The two values are
      equal for f32 weights.

    Cache
    - `cache` ("none"): "none" evaluates the whole sequence in every step and is exact. All others are
      approximate: a refresh stores keys and values, and until the next refresh only the other rows are
      evaluated. {cache}
    {options of cache}
    - `suffix_window` (`None`: all): full steps and refreshes evaluate so many of the next masks behind the
      block, and the last position. The other masks behind the block are neither evaluated nor stored
      (Streaming-dLLM). This is approximate with every cache and without one.

    Adaptive parallel decoding (`transfer` "adaptive"; `LLM` needs a `verifier`)
    - A step drafts the next masked positions. It accepts them up to the first position where the mixture of
      both models' logits would have chosen another token, and always accepts one. Draft and mixture share
      their Gumbel noise, which the published code forgets with a temperature (quirk Q17). A draft ends with
      its block. Without a cache both models see whole sequences. Caches that keep the best rows only are
      refused. Ids beyond the smaller vocabulary are never chosen. With `early_stop` the request ends with the
      step that accepts an end id in the generated part.

    Dream's published sampler (`transfer` and `remasking` stay at their defaults; blocks need a cache).
    `official` makes the published call, whose `top_k` is 50.
    - `alg` (`None`: LLaDA's rules): which of Dream's algorithms commits tokens. {alg}
    {options of alg}

    Prompt
    - `prompt_masks` ("error"): treatment of a mask id inside the prompt. "official" fills the mask as the
      official sampler does: from the first block on, at the expense of the block's own quota, so that
      some masks may be left at the end (quirks Q3, Q6). `LLM.infill` has a cleaner definition.
    - `prefilling` (`None`): how the long context of a prompt is prepared: `Prefilling`, or the name of a
      preset ("dream", "dream_sparse", "ultrallada", "ultrallada_sparse", "official_sparse", "official").
      The answer is denoised against the stored context, in blocks of `block_length`, the last perhaps
      shorter. With shifted logits the first step of a block commits its first token, whatever its confidence.
    - `return_history` (False): keep the sequence after every step in `RequestOutput.history`.
    - `priority` (0): the lowest number starts first and is served first, as in vLLM. Tokens do not depend on
      `priority`. Nobody who runs is stopped for others.

    Models that generate in several ways (Nemotron-Labs-Diffusion, and other block models)
    - `generation_mode` (`None`: "diffusion"): which way a request takes. "diffusion" fills one block after
      another, and takes the parameters of a block model. "bidirectional" does so too, but all tokens of the
      prompt see each other, and so do those of a block (Nemotron-Labs-Diffusion). "autoregressive" generates
      one token after another, and takes the parameters of a causal model. "self_speculation" gives the same
      tokens as "autoregressive" at temperature 0: the model drafts a block of `block_length` and verifies the
      draft. `transfer` says which masks of a draft an evaluation fills, by default all. Of block models
      without a causal context (SDAR, LLaDA2.0, Fast-dLLM v2) the tokens are those of `block_length` 1. The
      published way to verify drafts of SDAR and LLaDA2.0 is the `transfer` "lossy_speculation", which has
      other tokens. "auto" lets the engine choose by its load between one token after another and
      "self_speculation", which does not change the tokens. With a `transfer` it may also choose "diffusion",
      whose tokens are others.

    Causal models (Llama, Mistral, Qwen2, Qwen3), which generate one token after another
    - `repetition_penalty` (1.0): for causal models only: divides the positive logits of ids that occur in the
      prompt or the generated text, and multiplies the negative ones. This comes before temperature and
      filters, as in transformers and vLLM, and log-probabilities are measured after it.
    - `presence_penalty` (0.0), `frequency_penalty` (0.0): for causal models only, -2 to 2: subtracted from
      the logit of each generated id, once, and as often as it was generated. The prompt does not count. Both
      come after `repetition_penalty` and before temperature and filters, and log-probabilities are measured
      after them, too.
    - Causal models also take `gen_length`, `max_tokens`, `early_stop`, `stop`, `stop_token_ids`, `n`,
      `logprobs`, `temperature`, `top_p`, `top_k`, `min_p`, `seed`, `logits_eos_inf`, `undefined_tokens`,
      `structure`, `priority` and `return_history`. All other fields are for denoising: a request that changes
      one is refused.
    """

    max_tokens: Annotated[Length | None, none_at(-1)] = None
    steps: Length | None = None
    block_length: Length | None = None
    small_block_length: Length | None = None
    gen_length: Length = 128
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_tuple)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], BeforeValidator(_tuple)] = ()
    early_stop: bool = True
    stop_in_block: bool = False
    editing_threshold: Share | None = None
    max_post_steps: PostSteps = POST_STEPS
    penalty_lambda: Scale = 0.0
    min_tokens: Step = 0
    logit_bias: LogitBias = None
    allowed_token_ids: AllowedIds = None
    bad_words: BadWords = ()
    structure: StructureLike = None
    logprobs: Annotated[int | None, Field(ge=0, le=LISTED), BeforeValidator(_count)] = None
    temperature: Scale = 0.0
    top_p: Share | None = None
    top_k: Annotated[Annotated[int, Field(ge=1, lt=2**31)] | None, none_at(-1, 0)] = None
    min_p: Share | None = None
    repetition_penalty: _Factor = 1.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    cfg_scale: Scale = 0.0
    remasking: Remasking = "low_confidence"
    seed: Annotated[Annotated[int, Field(ge=0, lt=2**64)] | None, none_at(-1)] = 0
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: Literal["official", "fixed"] | None = None
    prompt_masks: Literal["error", "official"] = "error"
    confidence_dtype: Literal["float32", "model"] = "float32"
    undefined_tokens: Literal["official", "banned"] | None = None
    # The kinds of options are those that rules and policies declare: here they stand for type checkers.
    transfer: Transfer = "schedule"
    threshold: float | None = None
    threshold_strict: bool | None = None
    threshold_fall: float | None = None
    factor: float | None = None
    factor_end: str | None = None
    entropy_bound: float | None = None
    verify_policy: str | None = None
    verify_score: float | None = None
    verify_on: float | None = None
    verify_off: float | None = None
    verify_span: int | None = None
    verify_cost: float | None = None
    verify_cost_each: bool | None = None
    verify_sharpness: float | None = None
    commit_sure: bool | None = None
    causal_rows: bool | None = None
    alg: DreamAlgorithm | None = None
    alg_temp: float | None = None
    eps: float | None = None
    quota: str | None = None
    return_history: bool = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    cache: Cache = "none"
    retention: float | None = None
    pool_kernel: int | None = None
    refresh_delay: int | None = None
    refresh_interval: int | None = None
    official_forcing: bool | None = None
    suffix_window: Step | None = None
    mixture_weight: float | None = None
    max_lookahead: int | None = None
    prefilling: PrefillingLike = None
    generation_mode: GenerationMode | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _explained(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        is_call = isinstance(data, ArgsKwargs)
        given, further = taken_apart(cls, (data.kwargs or {}) if is_call else data)
        try:
            made = handler(ArgsKwargs(data.args, given) if is_call else given)
        except ValidationError as error:
            raise RequestError(explain(error, cls)) from None
        vars(made).update(further)
        check_together(made)
        if made.max_tokens is not None and "gen_length" not in given:
            block = made.block_length or 1
            object.__setattr__(made, "gen_length", -(-made.max_tokens // block) * block)
        if made.max_tokens is not None and made.max_tokens > made.gen_length:
            raise RequestError(
                f"max_tokens is {made.max_tokens}, more than gen_length {made.gen_length}:"
                " leave gen_length out"
            )
        most = made.max_tokens or made.gen_length
        if made.min_tokens > most:
            raise RequestError(f"min_tokens is {made.min_tokens}, more than the {most} tokens of the answer")
        return made

    @field_validator("*", mode="before")
    @classmethod
    def _plain_scalar(cls, value: object) -> object:
        return plain(value)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"

    @classmethod
    def official(cls, alg: DreamAlgorithm = "origin", **options: Any) -> Self:
        """Dream's published call with its defaults, `top_k` 50 included.

        No file of Dream states this number: the call builds its generation configuration from the model's
        configuration, which in transformers 4.46 has `top_k` 50 by default. So the published sampler keeps
        50 logits before it takes any confidence. Without this `top_k` several confidences differ, and with
        them orders and tokens.

        Arguments:
        - `alg`: Dream's algorithm, by default the published default.
        - `options`: other fields; they replace the preset's.
        """
        return cls(**{"alg": alg, "top_k": _OFFICIAL_TOP_K, **options})

    def changed(self, **options: Any) -> Self:
        """A copy with other values.

        Fields that lose their effect go back to their defaults, and so do fields that a new `transfer`, `alg`
        or `structure` excludes. `gen_length` follows a new `max_tokens`. Raises `RequestError` as the class
        itself does.
        """
        kept = dict(vars(self))
        if names := excluded(options, kept):
            bare = vars(type(self)())
            kept |= {name: bare[name] for name in names}
        if "max_tokens" in options:
            del kept["gen_length"]
        together = kept | options
        idle = [name for name in without_effect(together) if name not in options]
        return type(self)(**{name: value for name, value in together.items() if name not in idle})

    def effective(self, name: str) -> Any:
        """The value of a field, or its default where it is `None`."""
        value = getattr(self, name, None)
        return options()[name].option.default if value is None else value

    @property
    def options(self) -> Mapping[str, Any]:
        """The values of all options of rules and policies, or their defaults, by name."""
        return {name: self.effective(name) for name in options()}

    @property
    def adaptive(self) -> bool:
        """Whether a verifier decides which tokens are accepted."""
        return self.transfer == "adaptive"

    @property
    def lossy_speculation(self) -> bool:
        """Whether the model may verify each draft of a block, and drawn numbers accept its tokens."""
        return self.transfer == "lossy_speculation"

    @property
    def filters(self) -> dict[str, Any]:
        """`top_p`, `top_k` and `min_p` as far as they change a draw."""
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
    def controlled(self) -> bool:
        """Whether ids are excluded, or their logits changed, beyond what every request has."""
        biased = any((self.logit_bias or {}).values())
        banned = self.allowed_token_ids is not None or bool(self.bad_words)
        return biased or banned or self.min_tokens > 0 or self.structure is not None

    @property
    def bans_undefined(self) -> bool:
        """Whether the mask id and ids that the tokenizer does not define are kept out."""
        published = RULES["transfer", self.transfer].published
        return (self.undefined_tokens or ("official" if published else "banned")) == "banned"
