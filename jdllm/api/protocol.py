"""What requests may say: fields of OpenAI's API, and fields of `SamplingParams` by their own names."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, Self, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from jdllm.api.fields import Fields, PassedOver, nothing, only
from jdllm.api.formats import FormFields
from jdllm.checkpoints.conversation import SILENT, TEXT_PARTS, Rendering
from jdllm.decoding.kinds import LONGEST
from jdllm.decoding.sampling import SamplingParams, none_at
from jdllm.decoding.sampling_options import further_options, parameter_helps
from jdllm.pallas.masked_logits import LISTED

_APART = ("logprobs", "return_history", "stop", "stop_token_ids")
"""Fields of `SamplingParams` that are declared below, where OpenAI's forms differ; a history is for Python
alone."""

_KINDS = get_type_hints(SamplingParams, include_extras=True)

SAMPLING_FIELDS = tuple(name for name in _KINDS if name not in ("logprobs", "return_history"))

MAX_LISTED = 2048
"""Prompts, options or answers of one request.

Lists of lists are checked up to what is wrong first (`fail_fast`): to tell of all would take seconds."""

_AnyIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
Ids = Annotated[_AnyIds, Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
TextOrIds = Text | Ids
_Several = Field(min_length=1, max_length=MAX_LISTED, fail_fast=True)


def _sampling_fields() -> dict[str, Any]:
    """Fields of `SamplingParams`, which may be left out, with their bounds and descriptions."""
    helps = parameter_helps(SamplingParams)
    return {
        name: (Optional[kind], Field(default=None, description=helps.get(name)))  # noqa: UP045
        for name, kind in _KINDS.items()
        if name not in _APART
    }


if TYPE_CHECKING:

    class SamplingFields(Fields):
        n: int | None
        seed: int | None
        max_tokens: int | None
        gen_length: int | None
        steps: int | None
        block_length: int | None
        early_stop: bool | None
        structure: Any
else:
    SamplingFields = create_model("SamplingFields", __base__=Fields, **_sampling_fields())


class StreamOptions(Fields):
    """What a stream tells beside the text."""

    include_usage: Annotated[
        bool | None, Field(description="A last chunk with the usage and without choices.")
    ] = None
    continuous_usage_stats: Annotated[bool | None, Field(description="The usage so far in every chunk.")] = (
        None
    )
    include_obfuscation: PassedOver = None


class Asking(SamplingFields):
    """What every request that denoises may say.

    Options of rules and policies that were registered after this declaration are passed on as they are:
    `SamplingParams` checks them.
    """

    _further: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _take_further(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        names = data.keys() & further_options(SamplingParams).keys()
        made = handler({name: value for name, value in data.items() if name not in names})
        made._further = {name: data[name] for name in data if name in names}
        return made

    @property
    def further(self) -> dict[str, Any]:
        """Options that were registered after this declaration, by name."""
        return self._further

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


class OpenAIFields(FormFields, Asking):
    """Fields of OpenAI's and vLLM's that have one neutral value here, or no effect."""

    stream_options: StreamOptions | None = None
    ignore_eos: Annotated[
        bool | None, Field(description="Generate all tokens, whatever ends the text: early_stop off.")
    ] = None
    user: PassedOver = None
    store: PassedOver = None
    metadata: Annotated[dict[str, Any] | None, Field(max_length=16)] = None
    safety_identifier: PassedOver = None
    prompt_cache_key: PassedOver = None
    prompt_cache_retention: PassedOver = None
    cache_control: PassedOver = None
    service_tier: PassedOver = None
    reasoning_effort: PassedOver = None
    verbosity: PassedOver = None
    parallel_tool_calls: PassedOver = None
    spaces_between_special_tokens: PassedOver = None
    # Routers add these to the requests that they pass on.
    separate_reasoning: PassedOver = None
    stream_reasoning: PassedOver = None
    include_reasoning: PassedOver = None
    no_stop_trim: Annotated[bool | None, only(False, why="a text ends before its stop string")] = None
    return_hidden_states: Annotated[bool | None, only(False, why="no hidden states")] = None
    skip_special_tokens: Annotated[
        bool | None, only(True, why="texts are without special tokens; token_ids of completions have them")
    ] = None
    tools: Annotated[Any, nothing("no tools")] = None
    tool_choice: Annotated[Any, only("auto", "none", why="there are no tools")] = None
    functions: Annotated[Any, nothing("no functions")] = None
    function_call: Annotated[Any, only("auto", "none", why="there are no functions")] = None


class CompletionRequest(OpenAIFields):
    """POST /v1/completions."""

    prompt: Annotated[
        str | Ids | Annotated[list[str], _Several] | Annotated[list[_AnyIds], _Several],
        Field(description="A text, token ids, or a list of either. An empty one asks for any text."),
    ]
    max_tokens: Annotated[
        int | None,
        Field(ge=0, le=LONGEST, description="Tokens to return at most; 0 returns an echo alone."),
        none_at(-1),
    ] = None
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
        Field(
            ge=0,
            le=LISTED,
            description="Log-probabilities of the tokens, and of so many of the likeliest in their places.",
        ),
    ] = None
    best_of: Annotated[int | None, Field(ge=1, description="Only the value of n.")] = None


class TextPart(BaseModel):
    """A part of a message: text, or that an answer was refused. What else it has is passed over."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_text(self) -> Self:
        key = TEXT_PARTS[self.type]
        if getattr(self, key) is None:
            raise PydanticCustomError("no_text", "expected a text as {key}", {"key": key})
        return self


class ChatMessage(BaseModel):
    """A message of a conversation. What else it has is for the chat template, such as `tool_calls`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        str | Annotated[list[TextPart], Field(max_length=MAX_LISTED, fail_fast=True)] | None,
        Field(validate_default=True, description="A text, or a list of parts that are text."),
    ] = None

    @field_validator("content", mode="after")
    @classmethod
    def _is_there(cls, content: Any, info: ValidationInfo) -> Any:
        if content in (None, []) and info.data.get("role") not in SILENT:
            raise PydanticCustomError("missing", "expected a text or a list of parts")
        return content


Messages = Annotated[list[ChatMessage], _Several]


class TemplateFields(Fields):
    """How the chat template renders a conversation."""

    add_generation_prompt: Annotated[
        bool | None, Field(description="End with what begins an answer. [default: unless one is continued]")
    ] = None
    continue_final_message: Annotated[
        bool | None, Field(description="The answer goes on with the last message.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(description='Variables of the template, as {"enable_thinking": false}.')
    ] = None

    @property
    def rendering(self) -> Rendering:
        """The same for the tokenizer; raises `RequestError` for what does not go together."""
        return Rendering(
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            chat_template_kwargs=self.chat_template_kwargs or {},
        )


class ChatRequest(OpenAIFields, TemplateFields):
    """POST /v1/chat/completions."""

    messages: Messages
    context: Annotated[
        Text | None,
        Field(description="A long context at the beginning of the last message, prepared by prefilling."),
    ] = None
    max_completion_tokens: Annotated[
        int | None, Field(ge=1, le=LONGEST, description="As max_tokens."), none_at(-1)
    ] = None
    logprobs: Annotated[bool | None, Field(description="Log-probabilities of the tokens.")] = None
    top_logprobs: Annotated[
        int | None,
        Field(ge=0, le=LISTED, description="So many of the likeliest tokens in the place of each token."),
    ] = None
    modalities: Annotated[list[Literal["text"]] | None, Field(max_length=1)] = None


class TextSlot(Fields):
    """So many masked tokens."""

    type: Literal["text"]
    max_tokens: Annotated[int, Field(ge=1, le=2**20)]


class ChoiceSlot(Fields):
    """One of several texts, whichever is likeliest there."""

    type: Literal["choice"]
    options: Annotated[list[Text], Field(min_length=1, max_length=256, fail_fast=True)]


Part = str | TextSlot | ChoiceSlot


class InfillRequest(Asking):
    """POST /v1/infill. One of `text`, `token_ids` and `parts`."""

    text: Annotated[
        Text | Annotated[list[Text], _Several] | None,
        Field(description="A text, or several, with the mask token's text wherever a token is missing."),
    ] = None
    token_ids: Annotated[
        Ids | Annotated[list[Ids], _Several] | None,
        Field(description="Ids, or several lists of them, with the mask id wherever a token is missing."),
    ] = None
    parts: Annotated[
        Annotated[list[Part], _Several] | None,
        Field(description="Texts and the slots between them."),
    ] = None


class ScoreRequest(Fields):
    """POST /v1/score. All but `prompt` and `answers` are for models that denoise."""

    model: str | None = None
    prompt: Annotated[
        str | Ids,
        Field(description="Text or ids before the answers; may be empty unless the model needs a token."),
    ]
    answers: Annotated[list[TextOrIds], _Several]
    mc_num: Annotated[int, Field(ge=1, le=4096, description="Masked copies to average over.")] = 128
    batch_size: Annotated[int, Field(ge=1, le=4096, description="Copies that are stratified together.")] = 16
    cfg_scale: Annotated[float, Field(ge=0, le=1e6, description="Classifier-free guidance.")] = 0.0
    seed: Annotated[
        int, Field(ge=0, lt=2**64), BeforeValidator(lambda value: 0 if value == -1 else value)
    ] = 0
    block_length: Annotated[int | None, Field(ge=1, description="Positions of a block of a block model.")] = (
        None
    )
    parse_special: bool | None = None
    structure: Annotated[Any, nothing("given texts are scored, whatever form they have")] = None
    response_format: Annotated[Any, nothing("given texts are scored, whatever form they have")] = None


class TokenizeRequest(TemplateFields):
    """POST /tokenize. A prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: Annotated[
        bool | None, Field(description="Put those around a prompt that the tokenizer adds by itself.")
    ] = None
    parse_special: bool | None = None


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: _AnyIds


def given_fields(body: Asking) -> Mapping[str, Any]:
    """The fields of `SamplingParams` that a request says something about."""
    values = {name: getattr(body, name) for name in SAMPLING_FIELDS} | body.further
    return {name: value for name, value in values.items() if value is not None}
