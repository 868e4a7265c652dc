"""What a request of OpenAI's Responses API may say, as far as it is about text."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jdllm.api.formats import FlatSchemaFormat, Form, JsonObjectFormat, TextFormat, of_format
from jdllm.api.protocol import MAX_LISTED, ChatMessage, OpenAIFields
from jdllm.decoding.kinds import LONGEST
from jdllm.decoding.sampling import none_at

_PASSED_OVER = ConfigDict(strict=True, extra="ignore")
"""Items of an answer come back with an id, a status and annotations, which say nothing here."""


class ResponseMessage(ChatMessage):
    """A message of a conversation; an answer of this route is one."""

    model_config = _PASSED_OVER
    type: Literal["message"] | None = None

    def as_chat(self) -> ChatMessage:
        """The same as a message of POST /v1/chat/completions."""
        return ChatMessage(role=self.role, content=self.content)


class ResponseText(BaseModel):
    """How the answer's text is written."""

    model_config = _PASSED_OVER
    format: TextFormat | JsonObjectFormat | FlatSchemaFormat | None = None


class ResponsesRequest(OpenAIFields):
    """POST /v1/responses."""

    input: Annotated[
        str | Annotated[list[ResponseMessage], Field(min_length=1, max_length=MAX_LISTED, fail_fast=True)],
        Field(description="The text of one user message, or messages, earlier answers among them."),
    ]
    instructions: Annotated[
        str | None, Field(description="A system message before all others of the input.")
    ] = None
    max_output_tokens: Annotated[
        int | None, Field(ge=1, le=LONGEST, description="As max_tokens."), none_at(-1)
    ] = None
    previous_response_id: Annotated[
        str | None, Field(description="Refused: answers are not stored. Send the conversation as input.")
    ] = None
    text: ResponseText | None = None
    reasoning: Annotated[dict[str, Any] | None, Field(description="Without effect.")] = None
    include: Annotated[list[str] | None, Field(max_length=MAX_LISTED, description="Without effect.")] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None, Field(description="Without effect: nothing is ever left out.")
    ] = None
    background: Literal[False] | None = None
    max_tool_calls: int | None = None

    @property
    def forms(self) -> list[Form]:
        return super().forms + of_format("text", self.text and self.text.format)

    @property
    def messages(self) -> list[ChatMessage]:
        """The conversation that is answered."""
        before = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*before, ChatMessage(role="user", content=self.input)]
        return [*before, *(message.as_chat() for message in self.input)]
