"""`jdllm generate`: text after prompts."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jdllm.cli.compiling import told_of_compiling
from jdllm.cli.engine import ModelOptions, asked_sampling, load_model, takes_model
from jdllm.cli.groups import OptionGroup, takes_groups
from jdllm.cli.hosts import runs_on_hosts, several
from jdllm.cli.jsonl import generate_lines, read_lines
from jdllm.cli.options import Json, as_option, given_sampling, takes_sampling
from jdllm.cli.prompt import LongText, Prompts, check_given_once, read_long, read_prompts, read_text
from jdllm.cli.rendering import AddGenerationPrompt, ChatTemplateKwargs, ContinueFinalMessage, given_rendering
from jdllm.cli.report import print_result
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError

if TYPE_CHECKING:
    from jdllm.llm import LLM
    from jdllm.outputs import CompletionOutput, RequestOutput

TokenIds = Annotated[
    str | None, typer.Option(metavar="JSON", help="Prompts as ids instead of text, such as '[[5,6,7]]'.")
]


@dataclasses.dataclass(frozen=True)
class Given(OptionGroup):
    """Where prompts come from."""

    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="The prompts.", show_default=False)
    ] = None
    file: Annotated[Path | None, typer.Option(help="Read one prompt from a file.")] = None
    token_ids: TokenIds = None
    jsonl: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|-",
            help='Read a JSON object a line: {"prompt": ...}, {"prompt_token_ids": ...} or {"messages": ...},'
            " with sampling parameters of its own; print one a line, with what other keys the line has.",
        ),
    ] = None
    context: Annotated[
        Path | None,
        typer.Option(metavar="FILE|-", help="A long context, which --prefilling prepares for --query."),
    ] = None
    query: Annotated[str | None, typer.Option(help="The question over a --context.")] = None
    instruction: Annotated[
        str | None, typer.Option(help="What stands before a --context, and before every chunk of it.")
    ] = None

    def prompts_of_options(self) -> dict[str, object]:
        """Prompts that are no lines and no long context, by what gives them."""
        return {"an argument": self.prompts or None, "--file": self.file, "--token-ids": self.token_ids}


@dataclasses.dataclass(frozen=True)
class Read(OptionGroup):
    """How prompts are read."""

    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")] = (
        False
    )
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: ContinueFinalMessage = False
    chat_template_kwargs: ChatTemplateKwargs = None
    parse_special: Annotated[
        bool, typer.Option("--parse-special", help="Special tokens in a prompt become their ids.")
    ] = False


@takes_sampling()
@runs_on_hosts
@takes_model
@takes_groups
def generate(
    *,
    given: Given,
    read: Read,
    as_json: Json = False,
    source: ModelOptions,
    **options: Any,
) -> None:
    """Generate text after each prompt.

    Prompts come from one of: arguments, --file, --token-ids, --jsonl, or standard input; a line break at the
    very end of a file or of standard input is dropped. Before a prompt that begins with a dash, put --. In a
    terminal the text of a single prompt fills in while it denoises. A question over a long text is asked by
    --context and --query. Where the model has no tokenizer the generated ids are printed instead. What no
    option says is as the checkpoint's generation_config.json has it.
    """
    typed = given_sampling(options)
    rendering = given_rendering(
        read.add_generation_prompt, read.continue_final_message, read.chat_template_kwargs
    )
    if rendering and not read.chat and given.jsonl is None:
        raise RequestError(f"{as_option(next(iter(rendering)))} is for conversations: add --chat")
    if given.jsonl is not None:
        _answer_lines(given, given.jsonl, read, source, typed, rendering)
        return
    if not read.chat:
        rendering = None
    if given.context is not None or given.query is not None or given.instruction is not None:
        check_given_once({"--context": given.context or "-", **given.prompts_of_options()})
        long = read_long(given.context, given.query, given.instruction, read.chat)
        sampling = asked_sampling(source, {"steps": None, **typed})
        llm = load_model(source)
        with told_of_compiling():
            outputs = _answer(llm, long, sampling, rendering, read.parse_special)
    else:
        asked = read_prompts(given.prompts, given.file, given.token_ids)
        if read.chat and asked.texts is None:
            raise RequestError("--chat applies to prompts of text, not to --token-ids")
        sampling = asked_sampling(source, typed)
        llm = load_model(source)
        # Whoever watches wants every step, and other processes would take several at once.
        live = not (as_json or several()) and to_terminal()
        outputs = _generate(llm, asked, sampling, rendering, read.parse_special, live)
    print_outputs(outputs, as_json)


def _answer_lines(
    given: Given,
    jsonl: Path,
    read: Read,
    source: ModelOptions,
    typed: dict[str, Any],
    rendering: dict[str, Any],
) -> None:
    """Print a line for each line of `jsonl`."""
    check_given_once({"--jsonl": jsonl, **given.prompts_of_options(), "--chat": read.chat or None})
    lines = read_lines(read_text(None if str(jsonl) == "-" else jsonl, "lines", "--jsonl"))
    defaults = asked_sampling(source, typed)
    llm = load_model(source)
    with told_of_compiling():
        outputs = generate_lines(llm, lines, defaults, rendering, parse_special=read.parse_special)
    for line, output in zip(lines, outputs, strict=True):
        print_result(json.dumps(line.kept | json_fields(output)))


def _generate(
    llm: "LLM",
    asked: Prompts,
    sampling: SamplingParams,
    rendering: dict[str, Any] | None,
    parse_special: bool,
    live: bool,
) -> list["RequestOutput"]:
    """Answers to prompts; with `rendering` these are conversations."""

    def run(**how: Any) -> list["RequestOutput"]:
        if rendering is not None:
            conversations = [[{"role": "user", "content": text}] for text in asked.texts or []]
            return llm.chat(conversations, sampling, **rendering, **how)
        ids = asked.token_ids
        return llm.generate(asked.texts, sampling, prompt_token_ids=ids, parse_special=parse_special, **how)

    one = len(asked.texts or asked.token_ids or []) == sampling.n == 1
    # With masks in the prompt the response is not all that is filled in.
    if not (live and one and llm.tokenizer is not None and sampling.prompt_masks == "error"):
        with told_of_compiling():
            return run(progress=True)
    from rich.live import Live

    from jdllm.cli.live import LiveResponse

    response = LiveResponse(llm.tokenizer.decode, sampling.gen_length)
    # Elsewhere than in the terminal, standard error has to stay what it is.
    with (
        Live(response, transient=True, redirect_stderr=sys.stderr.isatty()),
        told_of_compiling(response.note),
    ):
        return run(on_step=response.take)


def _answer(
    llm: "LLM",
    long: LongText,
    sampling: SamplingParams,
    rendering: dict[str, Any] | None,
    parse_special: bool,
) -> list["RequestOutput"]:
    if rendering is not None:
        return llm.chat(long.query, sampling, context=long.context, **rendering, progress=True)
    return llm.generate(long._asdict(), sampling, parse_special=parse_special, progress=True)


def to_terminal() -> bool:
    """Whether somebody may watch the text."""
    return sys.stdout.isatty()


def print_outputs(outputs: list["RequestOutput"], as_json: bool) -> None:
    """Print one JSON object, or the text of each sample (its ids without a tokenizer)."""
    if as_json:
        print_result(json.dumps({"outputs": [json_fields(output) for output in outputs]}))
        return
    for output in outputs:
        for sample in output.outputs:
            print_result(str(sample.token_ids) if sample.text is None else sample.text)


def json_fields(output: "RequestOutput") -> dict[str, Any]:
    """What is printed of a request: its prompt, the first sample, and all of them where there are several."""
    prompt = {"prompt": output.prompt, "prompt_token_ids": output.prompt_token_ids, "seed": output.seed}
    first = prompt | _sample_fields(output.outputs[0])
    if len(output.outputs) == 1:
        return first
    return first | {"outputs": [{"index": s.index, **_sample_fields(s)} for s in output.outputs]}


def _sample_fields(sample: "CompletionOutput") -> dict[str, Any]:
    fields = sample.to_dict()
    return {
        name: value
        for name, value in fields.items()
        if name == "text" or (name != "index" and value is not None)
    }
