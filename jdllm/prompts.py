"""What a caller gives as prompts, read into token ids and made into requests."""

import dataclasses
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jdllm.arguments import shortened
from jdllm.checkpoints.conversation import Message, Rendering
from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.decoding.sampling import SamplingParams
from jdllm.distributed import check_same, from_first
from jdllm.errors import RequestError, naming
from jdllm.noise import sample_seed
from jdllm.serving.long.request import LongContext
from jdllm.serving.spec import RequestSpec

TokenIds = Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongPrompt:
    """A question over a long context; `SamplingParams.prefilling` says how the context is prepared.

    Each part is a text or token ids.

    - `instruction`: stands before the context, and before every chunk of it; may be empty.
    - `context`: text to cut into chunks; the best chunks are kept.
    - `query`: stands behind the context, before the answer.
    - `scoring_query` (`None`): scores the chunks instead of the query.
    """

    context: str | TokenIds
    query: str | TokenIds
    instruction: str | TokenIds = ""
    scoring_query: str | TokenIds | None = None


PromptLike = str | Mapping[str, Any] | LongPrompt
"""A text, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or a `LongPrompt` or its fields."""
Conversation = str | Sequence[Message]
"""Messages, or the text of one user message."""


_DRAWN_BITS = 53
"""Of seeds that nobody gave: every reader of JSON holds such numbers exactly."""


class Prompt(NamedTuple):
    """A prompt as text, where it came as text, and its ids, unchecked."""

    text: str | None
    ids: TokenIds | LongContext


class Encode(Protocol):
    """Text to ids; `begins`: with the special tokens that the tokenizer puts around a text."""

    def __call__(self, text: str, *, begins: bool = True) -> list[int]: ...


def read_prompts(
    prompts: PromptLike | Iterable[PromptLike] | None,
    token_ids: Iterable[TokenIds] | None,
    encode: Encode,
    names: tuple[str, str],
) -> list[Prompt]:
    """Read one prompt or many, from any iterable.

    Arguments:
    - `prompts`, `token_ids`: texts (or dicts), or lists of ids; one of the two.
    - `encode`: text to ids.
    - `names`: of these two arguments, for messages.

    Raises `RequestError` for anything else; it names the entry.
    """
    if (prompts is None) == (token_ids is None):
        raise RequestError(f"give either {names[0]} or {names[1]}")
    if prompts is None:
        return [Prompt(None, ids) for ids in _entries(token_ids, names[1])]
    one = isinstance(prompts, str | Mapping | LongPrompt)
    entries = [prompts] if one else _entries(prompts, names[0])
    read = []
    for i, entry in enumerate(entries):
        with naming("prompt", i, len(entries)):
            read.append(_read(entry, names[0] if one else f"{names[0]}[{i}]", encode))
    return read


def read_conversations(messages: Conversation | Iterable[Conversation]) -> list[Sequence[Message]]:
    """One conversation or many; their messages are not checked. `RequestError` for anything else."""
    if isinstance(messages, str):
        return [[{"role": "user", "content": messages}]]
    entries = _entries(messages, "messages")
    if entries and all(isinstance(entry, list | tuple) for entry in entries):
        return entries
    return [entries]


def read_conversation(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    context: str | None = None,
    rendering: Rendering | None = None,
) -> Prompt:
    """Render and encode a conversation, whose last message may have a long context at its beginning.

    `rendering`: by default up to the point where the model's answer begins.

    Raises `RequestError` where there is no template or it refuses the messages, and for an empty context.
    """
    rendering = rendering or Rendering()
    if context is None:
        return Prompt(*tokenizer.encode_chat(messages, rendering))
    if not context:
        raise RequestError("the context is empty: give at least one character, or leave it out")
    text, before, behind = tokenizer.encode_chat_around(messages, context, rendering)
    ids = tokenizer.encode(context, begins=False)
    return Prompt(text, LongContext(*map(np.asarray, (before, ids, behind, behind))))


def sampling_for_each(
    sampling: SamplingParams | Iterable[SamplingParams], count: int
) -> list[SamplingParams]:
    """Sampling parameters of each of `count` prompts, from one for all or one for each."""
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    each = list(sampling) if isinstance(sampling, Iterable) else []
    if not isinstance(sampling, Iterable) or not all(isinstance(s, SamplingParams) for s in each):
        raise RequestError("sampling must be SamplingParams: one for all prompts, or one for each")
    if len(each) != count:
        raise RequestError(f"{len(each)} sampling parameters for {count} prompts: give one for all or each")
    return each


class AskedPrompt(NamedTuple):
    """One prompt's text, where it has one, the seed of its draws, and what each sample asks for."""

    text: str | None
    seed: int
    specs: list[RequestSpec]


def specs_of(asked: Iterable[AskedPrompt]) -> list[RequestSpec]:
    """What the samples of all prompts ask for, in order of the prompts."""
    return [spec for one in asked for spec in one.specs]


def same_on_all(prompts: Sequence[Prompt], sampling: Sequence[SamplingParams]) -> list[SamplingParams]:
    """Parameters with seeds that all processes have; those that nobody gave are drawn by the first process.

    Raises `ConfigError` where another process has other prompts or parameters.
    """
    parts = [part for _, ids in prompts for part in (ids if isinstance(ids, LongContext) else [ids])]
    check_same("prompts or parameters", repr(([list(part) for part in parts], sampling)))
    drawn = from_first([secrets.randbits(_DRAWN_BITS) for _ in sampling])
    return [
        params.changed(seed=seed) if params.seed is None else params
        for params, seed in zip(sampling, drawn, strict=True)
    ]


def ask(
    prompts: Sequence[Prompt],
    sampling: Sequence[SamplingParams],
    make: Callable[[Any, SamplingParams], RequestSpec],
) -> list[AskedPrompt]:
    """What the requests of a call ask for.

    Arguments:
    - `prompts`, `sampling`: one for each prompt. A seed of `None` becomes a fresh one.
    - `make`: a request, from its ids and parameters.

    Raises `RequestError` for what cannot be served; it names the prompt.
    """
    asked = []
    for i, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        seed = secrets.randbits(_DRAWN_BITS) if params.seed is None else params.seed
        samples = [params.changed(n=1, seed=sample_seed(seed, k)) for k in range(params.n)]
        with naming("prompt", i, len(prompts)):
            specs = [make(prompt.ids, sample) for sample in samples]
        asked.append(AskedPrompt(prompt.text, seed, specs))
    return asked


def _entries(value: object, name: str) -> list[Any]:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | bytearray | Mapping):
        raise RequestError(f"{name} is {shortened(value)}, expected one entry for each prompt")
    return list(value)


def _read(entry: object, name: str, encode: Encode) -> Prompt:
    match entry:
        case LongPrompt():
            return read_long(entry, encode)
        case {"context": context, "query": query, **others} if others.keys() <= _FURTHER:
            return read_long(LongPrompt(context=context, query=query, **dict(others)), encode)
        case {"prompt": str(text), **others} if not others:
            return Prompt(text, encode(text))
        case {"prompt_token_ids": ids, **others} if not others:
            return Prompt(None, ids)
        case str(text):
            return Prompt(text, encode(text))
    raise RequestError(
        f"{name} is {shortened(entry)}, expected a text, {{'prompt': text}}, {{'prompt_token_ids': ids}} or a"
        " LongPrompt"
    )


_FURTHER = {"instruction", "scoring_query"}


def read_long(prompt: LongPrompt, encode: Encode) -> Prompt:
    """Read the parts of a long prompt; `RequestError` for one that is neither text nor ids, and for an empty
    context or query."""
    parts = dict(vars(prompt))
    if prompt.scoring_query is None:
        parts["scoring_query"] = prompt.query
    for name, part in parts.items():
        if not isinstance(part, str | Sequence | np.ndarray):
            raise RequestError(f"{name} of a long prompt is {shortened(part)}, expected a text or ids")
        if not len(part) and name != "instruction":
            raise RequestError(f"the {name} of a long prompt is empty: give at least one token")

    def ids(name: str) -> Any:
        part = parts[name]
        if not isinstance(part, str):
            return part
        # Special tokens that begin a text begin the instruction alone.
        return encode(part, begins=name == "instruction") if part or name == "instruction" else []

    texts = [parts[name] for name in ("instruction", "context", "query")]
    text = "".join(texts) if all(isinstance(part, str) for part in texts) else None
    return Prompt(text, LongContext(*map(ids, LongContext._fields)))
