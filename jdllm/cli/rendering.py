"""How conversations are rendered: options of commands that take some."""

import json
from typing import Annotated, Any

import typer

from jdllm.checkpoints.conversation import Rendering
from jdllm.errors import RequestError

NAMES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
"""Fields of `Rendering`."""

AddGenerationPrompt = Annotated[
    bool | None,
    typer.Option(
        "--add-generation-prompt/--no-add-generation-prompt",
        help="End a conversation with what begins an answer.",
        show_default="unless its last message is continued",
    ),
]
ContinueFinalMessage = Annotated[
    bool, typer.Option("--continue-final-message", help="Go on with the last message of a conversation.")
]
ChatTemplateKwargs = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="""Variables of the chat template, as '{"enable_thinking": false}'."""),
]


def given_rendering(
    add_generation_prompt: bool | None, continue_final_message: bool, chat_template_kwargs: str | None
) -> dict[str, Any]:
    """Fields of `Rendering` from the options that were typed; `RequestError` for what cannot be."""
    given: dict[str, Any] = {}
    if add_generation_prompt is not None:
        given["add_generation_prompt"] = add_generation_prompt
    if continue_final_message:
        given["continue_final_message"] = True
    if chat_template_kwargs is not None:
        try:
            given["chat_template_kwargs"] = json.loads(chat_template_kwargs)
        except (ValueError, RecursionError) as e:
            raise RequestError(f"--chat-template-kwargs is not JSON ({e})") from None
    Rendering(**given)
    return given
