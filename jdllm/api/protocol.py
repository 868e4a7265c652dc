"""What requests may say: the fields of OpenAI's API, and those of `SamplingParams` by their own names."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from jdllm.declarations import descriptions
from jdllm.decoding.sampling import SamplingParams

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_APART = ("logprobs", "return_history", "stop", "stop_token_ids")
"""Fields of `SamplingParams` that are declared below, where OpenAI's forms differ; a history is for Python
alone."""

_KINDS = get_type_hints(SamplingParams, include_extras=True)

SAMPLING_FIELDS = tuple(name for name in _KINDS if name not in ("logprobs", "return_history"))

MAX_LISTED = 2048
"""Prompts, options or answers of one request.

Lists of lists are checked up to what is wrong first (`fail_fast`): to tell of all would take seconds."""

Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
TextOrIds = Text | Ids


def _sampling_fields() -> dict[str, Any]:
    """Fields of `SamplingParams`, which may be left out, with their bounds and descriptions."""
    helps = descriptions(SamplingParams)
    return {
        name: (Optional[kind], Field(default=None, description=helps.get(name)))  # noqa: UP045
        for name, kind in _KINDS.items()
        if name not in _APART
    }


if TYPE_CHECKING:

    class SamplingFields(BaseModel):
        n: int | None
        seed: int | None
        max_tokens: int | None
        gen_length: int | None
        steps: int | None
        block_length: int | None
        early_stop: bool | None
else:
    SamplingFields = create_model("SamplingFields", __config__=_STRICT, **_sampling_fields())


class TextFormat(BaseModel):
    """The only format of answers: text."""

    model_config = _STRICT
    type: Literal["text"]


class StreamOptions(BaseModel):
    """What a stream tells beside the text."""

    model_config = _STRICT
    include_usage: Annotated[
        bool | None, Field(description="A last chunk with the usage and without choices.")
    ] = None
    continuous_usage_stats: Annotated[bool | None, Field(description="The usage so far in every chunk.")] = (
        None
    )
    include_obfuscation: Annotated[bool | None, Field(description="Without effect.")] = None


class Asking(SamplingFields):
    """What every request that denoises may say."""

    model: Annotated[str | None, Field(description="A name of GET /v1/models; by default the first.")] = None
    parse_special: Annotated[
        bool | None, Field(description="Special tokens in texts become their ids; else they are plain text.")
    ] = None
    stop: Annotated[
        Text | Annotated[list[Text], Field(max_length=64)] | None,
        Field(description="Texts that end the answer; they are not part of it."),
    ] = None
    stop_token_ids: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**31)]] | None,
        Field(max_length=MAX_LISTED, description="Ids that end the answer."),
    ] = None
    stream: Annotated[bool | None, Field(description="Answer by server-sent events.")] = None
    stream_mode: Annotated[
        Literal["text", "denoise"] | None,
        Field(description='"text": committed text in order; "denoise": an event for every denoising step.'),
    ] = None


class OpenAIFields(Asking):
    """Fields of OpenAI's that have one neutral value here, or no effect."""

    stream_options: StreamOptions | None = None
    ignore_eos: Annotated[
        bool | None, Field(description="Generate all tokens, whatever ends the text: early_stop off.")
    ] = None
    user: str | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str] | None, Field(max_length=16)] = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    presence_penalty: Annotated[float | None, Field(ge=0, le=0)] = None
    frequency_penalty: Annotated[float | None, Field(ge=0, le=0)] = None
    logit_bias: Annotated[dict[str, float] | None, Field(max_length=0)] = None
    response_format: TextFormat | None = None


class CompletionRequest(OpenAIFields):
    """POST /v1/completions."""

    prompt: Annotated[
        Text
        | Ids
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_LISTED)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_LISTED)],
        Field(description="A text, token ids, or a list of either."),
    ]
    context: Annotated[
        TextOrIds | None,
        Field(description="A long context before the prompt; prefilling says how it is prepared."),
    ] = None
    instruction: Annotated[
        str | Ids | None, Field(description="Text or ids before the context, and before every chunk of it.")
    ] = None
    suffix: Annotated[str | None, Field(description="Text behind the answer: what is between is filled.")] = (
        None
    )
    echo: Annotated[bool | None, Field(description="Put the prompt before the answer.")] = None
    logprobs: Annotated[
        int | None,
        Field(ge=0, le=1, description="Log-probabilities of the tokens: 0 or 1, there are no others."),
    ] = None
    best_of: Annotated[int | None, Field(ge=1, description="Only the value of n.")] = None


class TextPart(BaseModel):
    """A part of a message."""

    model_config = _STRICT
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of a conversation."""

    model_config = _STRICT
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_LISTED)]
    name: str | None = None

    @property
    def texts(self) -> list[str]:
        """What its content consists of."""
        return [self.content] if isinstance(self.content, str) else [part.text for part in self.content]


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_LISTED, fail_fast=True)]


class ChatRequest(OpenAIFields):
    """POST /v1/chat/completions."""

    messages: Messages
    context: Annotated[
        Text | None,
        Field(description="A long context at the beginning of the last message, prepared by prefilling."),
    ] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=2**24)] = None
    logprobs: Annotated[bool | None, Field(description="Log-probabilities of the tokens.")] = None
    top_logprobs: Annotated[
        int | None, Field(ge=0, le=1, description="The token itself (1), or none: there are no others.")
    ] = None
    tools: Annotated[list[Any] | None, Field(max_length=0)] = None
    tool_choice: Literal["none"] | None = None
    modalities: Annotated[list[Literal["text"]] | None, Field(max_length=1)] = None


class TextSlot(BaseModel):
    """So many masked tokens."""

    model_config = _STRICT
    type: Literal["text"]
    max_tokens: Annotated[int, Field(ge=1, le=2**20)]


class ChoiceSlot(BaseModel):
    """One of several texts, whichever is likeliest there."""

    model_config = _STRICT
    type: Literal["choice"]
    options: Annotated[list[Text], Field(min_length=1, max_length=256)]


Part = str | TextSlot | ChoiceSlot


class InfillRequest(Asking):
    """POST /v1/infill. One of `text`, `token_ids` and `parts`."""

    text: Annotated[
        Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_LISTED)] | None,
        Field(description="A text, or several, with the mask token's text wherever a token is missing."),
    ] = None
    token_ids: Annotated[
        Ids | Annotated[list[Ids], Field(min_length=1, max_length=MAX_LISTED)] | None,
        Field(description="Ids, or several lists of them, with the mask id wherever a token is missing."),
    ] = None
    parts: Annotated[
        Annotated[list[Part], Field(fail_fast=True)] | None,
        Field(min_length=1, max_length=MAX_LISTED, description="Texts and the slots between them."),
    ] = None


class ScoreRequest(BaseModel):
    """POST /v1/score. `mc_num`, `batch_size`, `cfg_scale` and `seed` are for models that denoise."""

    model_config = _STRICT
    model: str | None = None
    prompt: Annotated[
        str | Ids,
        Field(description="Text or ids before the answers; may be empty, but a causal model needs a token."),
    ]
    answers: Annotated[list[TextOrIds], Field(min_length=1, max_length=MAX_LISTED)]
    mc_num: Annotated[int, Field(ge=1, le=4096, description="Masked copies to average over.")] = 128
    batch_size: Annotated[int, Field(ge=1, le=4096, description="Copies that are stratified together.")] = 16
    cfg_scale: Annotated[float, Field(ge=0, le=1e6, description="Classifier-free guidance.")] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    parse_special: bool | None = None


class TokenizeRequest(BaseModel):
    """POST /tokenize. A prompt, or messages."""

    model_config = _STRICT
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: Literal[True] | None = None
    parse_special: bool | None = None


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = _STRICT
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


def given_fields(body: BaseModel) -> Mapping[str, Any]:
    """The fields of `SamplingParams` that a request says something about."""
    values = {name: getattr(body, name) for name in SAMPLING_FIELDS}
    return {name: value for name, value in values.items() if value is not None}
