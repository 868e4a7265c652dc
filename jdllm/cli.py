"""The command line: `jdllm generate` and `jdllm eval`.

Standard output carries results only; warnings, progress and errors go to standard error. A user's mistake is
one line there and exit code 2. The heavy imports wait until a command runs.
"""

import dataclasses
import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import JdllmError, RequestError

if TYPE_CHECKING:
    from rich.text import Text

    from jdllm.llm import LLM
    from jdllm.outputs import RequestOutput
    from jdllm.serving.engine import StepUpdate

USER_MISTAKE = 2

_DEFAULTS = SamplingParams()
_PROMPT_SOURCES = "an argument, --file, --token-ids or standard input"


class _Commands(TyperGroup):
    """Reports a user's mistake, of the command line or of the library, as one line and exit code 2."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                code = super().main(*args, standalone_mode=False, **extra)
            except (JdllmError, typer.TyperException) as e:
                message = e.format_message() if isinstance(e, typer.TyperException) else str(e)
                _say("error", message)
                code = USER_MISTAKE
        sys.exit(code)


app = typer.Typer(
    cls=_Commands,
    help="Diffusion language models in JAX.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the decorated help cuts long option names off
)


@app.callback()
def _tmp():
    "x"


Model = Annotated[
    str | None,
    typer.Option(metavar="DIR_OR_HUB_ID", help="Checkpoint; the bundled demo model if not given."),
]
Dtype = Annotated[str, typer.Option(metavar="auto|float32|bfloat16|float16", help="Type of the weights.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

GenLength = Annotated[int, typer.Option(help="Tokens to generate.")]
Steps = Annotated[int | None, typer.Option(help="Denoising steps in all. [default: gen-length]")]
BlockLength = Annotated[
    int | None,
    typer.Option(help="Length of the blocks, left to right. [default: gen-length]"),
]
Temperature = Annotated[float, typer.Option(help="0 takes the argmax.")]
CfgScale = Annotated[float, typer.Option(help="Classifier-free guidance.")]
Remasking = Annotated[
    str,
    typer.Option(metavar="low_confidence|random", help="Which tokens are committed first."),
]
Seed = Annotated[int, typer.Option(help="Of all random draws.")]
EarlyStop = Annotated[
    bool,
    typer.Option(
        "--early-stop/--no-early-stop",
        help="Stop after the block in which the text ends, and cut the token ids there.",
    ),
]
LogitsEosInf = Annotated[
    bool,
    typer.Option("--logits-eos-inf", help="Never choose the end-of-sequence id."),
]
ConfidenceEosEotInf = Annotated[
    str | None,
    typer.Option(metavar="official|fixed", help="Commit end ids as late as possible."),
]
PromptMasks = Annotated[
    str,
    typer.Option(metavar="error|official", help="What to do with mask ids in a prompt."),
]
ConfidenceDtype = Annotated[str, typer.Option(metavar="float32|model", help="Type of the confidences.")]


@app.command()
def generate(
    ctx: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="The prompt.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    token_ids: Annotated[
        str | None, typer.Option(metavar="JSON", help="Prompts as ids instead of text, such as '[[5,6,7]]'.")
    ] = None,
    model: Model = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    dtype: Dtype = "auto",
    json_output: Json = False,
    gen_length: GenLength = _DEFAULTS.gen_length,
    steps: Steps = _DEFAULTS.steps,
    block_length: BlockLength = _DEFAULTS.block_length,
    temperature: Temperature = _DEFAULTS.temperature,
    cfg_scale: CfgScale = _DEFAULTS.cfg_scale,
    remasking: Remasking = _DEFAULTS.remasking,
    seed: Seed = _DEFAULTS.seed,
    early_stop: EarlyStop = _DEFAULTS.early_stop,
    logits_eos_inf: LogitsEosInf = _DEFAULTS.logits_eos_inf,
    confidence_eos_eot_inf: ConfidenceEosEotInf = _DEFAULTS.confidence_eos_eot_inf,
    prompt_masks: PromptMasks = _DEFAULTS.prompt_masks,
    confidence_dtype: ConfidenceDtype = _DEFAULTS.confidence_dtype,
) -> None:
    """Generate text after a prompt.

    The prompt comes from one of: the argument, --file, --token-ids, or standard input; a line break at the
    very end of a file or of standard input is dropped. In a terminal the text fills in while it denoises.
    Where the model has no tokenizer the generated ids are printed instead.
    """
    sampling = _sampling(ctx)
    text, ids = _read_prompt(prompt, file, token_ids)
    if chat and text is None:
        raise RequestError("--chat applies to a prompt of text, not to --token-ids")
    llm = _load(model, dtype)
    if chat and text is not None:
        text = llm.chat_prompt(text)
    outputs = _generate(llm, text, ids, sampling, live=not json_output and sys.stdout.isatty())
    if json_output:
        _print(json.dumps({"outputs": [_as_json(o) for o in outputs]}))
    else:
        for o in outputs:
            _print(str(o.token_ids) if o.text is None else o.text)


def main() -> None:
    """Entry point of the `jdllm` command."""
    # XLA's C++ log otherwise mixes warnings meant for its developers into the output.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    app()


def _sampling(ctx: typer.Context) -> SamplingParams:
    """The sampling parameters among a command's options, which bear the same names."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    return SamplingParams(**{name: value for name, value in ctx.params.items() if name in names})


def _load(model: str | None, dtype: str) -> "LLM":
    from jdllm.demo import checkpoint_path
    from jdllm.llm import LLM

    return LLM(checkpoint_path() if model is None else model, dtype=dtype)


def _read_prompt(
    argument: str | None, file: Path | None, token_ids: str | None
) -> tuple[str | None, list[list[int]] | None]:
    """The prompt as text, or the prompts as ids: exactly one of the two is not `None`."""
    given = {"an argument": argument, "--file": file, "--token-ids": token_ids}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise RequestError(f"the prompt is given by {' and '.join(names)}: give it once")
    if token_ids is not None:
        return None, _parse_ids(token_ids)
    if argument is not None:
        text = _decode(argument.encode(errors="surrogateescape"), "the prompt")
    elif file is not None:
        text = _one_line_end_less(_decode(_read(file), f"--file {file}"))
    elif sys.stdin is not None and not sys.stdin.isatty():
        text = _one_line_end_less(_decode(sys.stdin.buffer.read(), "standard input"))
    else:
        raise RequestError(f"no prompt: give it by {_PROMPT_SOURCES}")
    if not text:
        raise RequestError(f"the prompt is empty: give it by {_PROMPT_SOURCES}")
    return text, None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as e:
        raise RequestError(f"--file {file} cannot be read: {e.strerror}") from None


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise RequestError(f"{where} is not UTF-8 text (byte {e.start})") from None


def _one_line_end_less(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _parse_ids(text: str) -> list[list[int]]:
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise RequestError(f"--token-ids is not JSON ({e}): expected such as [[5,6,7]]") from None
    if not isinstance(ids, list) or not ids or not all(isinstance(row, list) for row in ids):
        raise RequestError(
            "--token-ids must be a list with one list of ids for each prompt, such as [[5,6,7]]"
        )
    for x in itertools.chain.from_iterable(ids):
        if not isinstance(x, int) or isinstance(x, bool):
            raise RequestError(f"--token-ids holds {json.dumps(x)}: every id must be an integer")
    return ids


def _generate(
    llm: "LLM", text: str | None, ids: list[list[int]] | None, sampling: SamplingParams, live: bool
) -> list["RequestOutput"]:
    if not live or llm.tokenizer is None or (ids is not None and len(ids) > 1):
        return llm.generate(text, prompt_token_ids=ids, sampling=sampling)
    from rich.console import Console
    from rich.live import Live

    start = len(ids[0] if ids is not None else llm.tokenizer.encode(text or ""))
    response = LiveResponse(llm.tokenizer.decode, start, sampling.gen_length)
    with Live(response, console=Console(), transient=True):
        return llm.generate(text, prompt_token_ids=ids, sampling=sampling, on_step=response.take)


class LiveResponse:
    """The response while it denoises, for a terminal: committed tokens plain, provisional ones dimmed, and a
    shade for each position that was not evaluated yet.

    Arguments:
    - `decode`: ids to text.
    - `start`, `length`: the positions of the response in the sequence.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], start: int, length: int):
        self._decode = decode
        self._start = start
        self._tokens: list[tuple[str, int]] = [("unseen", 0)] * length

    def take(self, update: "StepUpdate") -> None:
        """Take in what one step chose and committed."""
        chosen = (update.positions.tolist(), update.provisional.tolist(), update.committed.tolist())
        for position, token, committed in zip(*chosen, strict=True):
            if position >= self._start:
                self._tokens[position - self._start] = ("committed" if committed else "provisional", token)

    def __rich__(self) -> "Text":
        from rich.text import Text

        text = Text()
        for state, run in itertools.groupby(self._tokens, itemgetter(0)):
            ids = [token for _, token in run]
            text.append(
                "░" * len(ids) if state == "unseen" else self._decode(ids),
                style=None if state == "committed" else "dim",
            )
        return text


def _as_json(output: "RequestOutput") -> dict[str, Any]:
    timings = output.timings
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "nfe": output.nfe,
        "timings": {"queued": timings.queued, "running": timings.running, "total": timings.total},
    }


def _print(text: str) -> None:
    # Flushed here, where a reader that has closed the pipe is still met without a traceback.
    print(text, flush=True)


def _say(kind: str, message: str) -> None:
    print(f"{kind}: {' '.join(message.split())}", file=sys.stderr)


def _show_warning(message: Warning | str, *_: Any) -> None:
    _say("warning", str(message))
