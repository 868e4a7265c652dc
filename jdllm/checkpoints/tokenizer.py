"""The checkpoint's tokenizer and chat template."""

import contextlib
import dataclasses
import inspect
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jdllm.checkpoints.conversation import Message, Rendering, forms, plain_message
from jdllm.checkpoints.gguf.tokenizer import read_gguf_tokenizer
from jdllm.checkpoints.special_tokens import SpecialTokens
from jdllm.checkpoints.token_text import Ids, TokenText
from jdllm.errors import CheckpointError, RequestError
from jdllm.gguf_files import is_gguf
from jdllm.models.config import ModelConfig
from jdllm.models.registry import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FILE = "tokenizer.json"
_BYTE_PAIR_FILES = ("vocab.json", "merges.txt")
_END_OF_TURN = "<|eot_id|>"
_PLACE = "\ufdd1"  # a noncharacter, which Unicode keeps from interchanged text

_RENDERED = Rendering()


def load_tokenizer(path: str | Path) -> "Tokenizer | None":
    """Read the tokenizer of a checkpoint.

    Arguments:
    - `path`: the directory of the checkpoint, or a GGUF file: the files beside it go before its metadata.

    Returns the tokenizer, or `None` where the directory has neither `tokenizer.json` nor `vocab.json` with
    `merges.txt`, which are read as Qwen2's byte-pair encoding (Dream's): token ids still work.

    Raises `CheckpointError` for tokenizer files that cannot be read.
    """
    path = Path(path)
    if is_gguf(path):
        return load_tokenizer(path.parent) or _of_gguf(path)
    single = (path / _FILE).is_file()
    if not single and not all((path / name).is_file() for name in _BYTE_PAIR_FILES):
        return None
    reader = _reader(single=single)
    try:
        return Tokenizer(path, reader.from_pretrained(path))
    except Exception as e:  # the library raises a bare Exception for a damaged file
        raise CheckpointError(f"the tokenizer files of {path} cannot be read: {e}") from None


def _of_gguf(path: Path) -> "Tokenizer | None":
    try:
        found = read_gguf_tokenizer(path)
    except CheckpointError:
        raise
    except Exception as e:  # as above, and whatever metadata that do not fit together lead to
        raise CheckpointError(f"the tokenizer of {path} cannot be read: {e}") from None
    if found is None:
        return None
    tokenizer, given = found
    return Tokenizer(path, _reader(single=True)(tokenizer_object=tokenizer, **given))


def _reader(*, single: bool) -> "type[PreTrainedTokenizerFast]":
    """The class that reads a `tokenizer.json`, or byte pairs; importing the latter takes twice as long."""
    with _without_framework_advice():
        if single:
            from transformers import PreTrainedTokenizerFast as Reader
        else:
            from transformers import Qwen2Tokenizer as Reader
    return Reader


def complete_ids(config: ModelConfig, tokenizer: "Tokenizer", overrides: Collection[str] = ()) -> ModelConfig:
    """Take from a checkpoint's tokenizer which tokens mask, end a turn and end a text.

    Arguments:
    - `config`: the model; a mask and an end of a turn that it states are kept.
    - `tokenizer`: the checkpoint's; the family knows the text of its tokens. The tokenizer's end of a text
      counts beside the ends that `config` has.
    - `overrides`: keys of `config.json` that the user replaced; with `eos_token_id`, no other ends count.

    Returns the configuration with the ids that were found; the others stay `None`.
    """
    family = FAMILIES[config.family]
    tokens = {"mask_id": family.mask_token, "eot_id": family.turn_end}
    absent = {key: token for key, token in tokens.items() if token and getattr(config, key) is None}
    config = dataclasses.replace(config, **{key: tokenizer.token_id(token) for key, token in absent.items()})
    if tokenizer.eos_id is None or "eos_token_id" in overrides:
        return config
    first, *more = dict.fromkeys([*config.eos_ids, tokenizer.eos_id])
    return dataclasses.replace(config, eos_id=first, more_eos_ids=tuple(more))


class Tokenizer:
    """Text to token ids and back, as the checkpoint defines it.

    Arguments:
    - `path`: the directory it comes from, for messages.
    - `tokenizer`: the tokenizer of transformers.
    """

    def __init__(self, path: Path, tokenizer: "PreTrainedTokenizerFast"):
        self._path = path
        self._tokenizer = tokenizer
        unknown, backend = tokenizer.unk_token, tokenizer.backend_tokenizer
        self._special = SpecialTokens(backend, None if unknown is None else str(unknown))
        self._texts = TokenText(backend)

    def __len__(self) -> int:
        """Number of ids that it defines; the model's vocabulary may be larger."""
        return len(self._tokenizer)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token that it defines, with its id."""
        return self._tokenizer.get_vocab()

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` and the files that belong to it."""
        self._tokenizer.save_pretrained(directory)

    @property
    def eot_id(self) -> int | None:
        """Id of `<|eot_id|>`, which ends a turn, or `None`; LLaDA's `config.json` does not state it."""
        return self.token_id(_END_OF_TURN)

    @property
    def bos_id(self) -> int | None:
        """Id of the token that begins a sequence, or `None`."""
        found = self._tokenizer.bos_token_id
        return found if isinstance(found, int) else None

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a text, or `None`."""
        found = self._tokenizer.eos_token_id
        return found if isinstance(found, int) else None

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts of named special tokens, such as `bos_token`, as far as there are any."""
        return {name: str(token) for name, token in self._tokenizer.special_tokens_map.items()}

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens, which give no text."""
        return self._texts.special_ids

    @property
    def chat_template(self) -> str | None:
        """The template of conversations, in Jinja, or `None`."""
        template = self._tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def token_id(self, token: str) -> int | None:
        """Id of a token by its exact text, or `None` where it is not in the vocabulary."""
        return self._tokenizer.get_vocab().get(token)

    def token(self, index: int) -> str | None:
        """Text of the token with an id, or `None` where the tokenizer does not define it."""
        return self._texts.name(index)

    def encode(
        self, text: str, *, parse_special: bool = False, parsed: Collection[str] = (), begins: bool = True
    ) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer adds by itself.

        Arguments:
        - `begins`: otherwise it adds none: the text is a part of a longer one.
        - `parse_special`: special tokens in `text` become their ids; otherwise they are plain text. Then none
          is added to a text that begins with the BOS token, as a rendered chat template does.
        - `parsed`: special tokens that become their ids all the same.

        Raises `RequestError` for a lone surrogate, which is no text.
        """
        _check_surrogates(text)
        if not parse_special:
            return self._special.encode(self._special.protect(text, parsed), adds_special=begins)
        bos = self._tokenizer.bos_token
        begins = begins and not (bos and text.startswith(str(bos)))
        return self._tokenizer.encode(text, add_special_tokens=begins)

    def decode(self, ids: Ids, before: Ids = (), *, final: bool = True) -> str:
        """Text of `ids` without special tokens, behind others; see `TokenText.decode`."""
        return self._texts.decode(ids, before, final=final)

    def offsets(self, ids: Ids, before: Ids = ()) -> list[int]:
        """Where in `decode(ids, before)` the text of each of `ids` begins; see `TokenText.offsets`."""
        return self._texts.offsets(ids, before)

    def offsets_in(self, text: str, ids: Ids) -> list[int]:
        """Where in `text`, which was encoded as `ids`, each begins; see `TokenText.offsets_in`."""
        return self._texts.offsets_in(text, ids)

    def token_bytes(self, index: int) -> bytes:
        """The bytes of a token, which may be a part of a character; see `TokenText.token_bytes`."""
        return self._texts.token_bytes(index)

    def encode_chat(
        self, messages: Sequence[Message], rendering: Rendering = _RENDERED
    ) -> tuple[str, list[int]]:
        """Render a conversation, and encode it.

        Arguments:
        - `messages`: see `Message`; several texts of one message are joined by line breaks.
        - `rendering`: how; by default up to the point where the model's answer begins.

        Returns the rendered text and its ids, in which only what the template itself says is special: special
        tokens inside a message are plain text.

        Raises what `apply_chat_template` raises.
        """
        rendered = self._render(messages, rendering, protected=True)
        return self._special.restore(rendered), self._special.encode(rendered, adds_special=False)

    def encode_chat_around(
        self, messages: Sequence[Message], context: str, rendering: Rendering = _RENDERED
    ) -> tuple[str, list[int], list[int]]:
        """Render a conversation whose last message has a context at its beginning.

        Arguments:
        - `messages`: the conversation; several texts of one message are joined by line breaks.
        - `rendering`: how the template renders; by default up to the beginning of the model's answer.
        - `context`: stands before the text of the last message; it is not encoded here.

        Returns the rendered text with the context, and the ids before and behind the context.

        Raises what `apply_chat_template` raises, and `RequestError` where the template does not show the last
        message once, as it is.
        """
        *before, last = [plain_message(i, message) for i, message in enumerate(messages)] or [None]
        marked = [] if last is None else [*before, {**last, "content": _PLACE + last["content"]}]
        rendered = self._render(marked, rendering, protected=True)
        if rendered.count(_PLACE) != 1:
            raise RequestError(f"the chat template of {self._path} does not show the last message as it is")
        head, tail = rendered.split(_PLACE)
        start, end = (self._special.encode(part, adds_special=False) for part in (head, tail))
        return self._special.restore(head) + context + self._special.restore(tail), start, end

    def apply_chat_template(self, messages: Sequence[Message], rendering: Rendering = _RENDERED) -> str:
        """Render a conversation.

        Arguments:
        - `messages`: the conversation; several texts of one message are joined by line breaks.
        - `rendering`: how the template renders; by default up to the beginning of the model's answer.

        Returns the text, to `encode` with `parse_special`.

        Raises `RequestError` where the checkpoint has no chat template (base models have none), a message is
        none, or the template refuses the messages in every form that they can have.
        """
        return self._render(messages, rendering, protected=False)

    def _render(self, messages: Sequence[Message], rendering: Rendering, *, protected: bool) -> str:
        if not self._tokenizer.chat_template:
            raise RequestError(
                f"the tokenizer of {self._path} has no chat template: give the prompt as plain text"
            )
        if not messages:
            raise RequestError("there is no message to answer: give at least one")
        plain = [plain_message(i, message) for i, message in enumerate(messages)]
        for i, message in enumerate(plain):
            for key in ("role", "content"):
                _check_surrogates(message[key], f"message {i}: ")
        self._check_variables(rendering)
        variables = dict(rendering.chat_template_kwargs)
        if protected:
            variables = self._protect(variables)
        refused = None
        for form in forms(plain, self.chat_template or ""):
            told = self._protect(form) if protected else form
            try:
                rendered = self._tokenizer.apply_chat_template(
                    told,
                    tokenize=False,
                    add_generation_prompt=rendering.begins_answer,
                    continue_final_message=rendering.continue_final_message,
                    **variables,
                )
            except Exception as e:  # a template is a program: it may fail in any way
                refused = refused or e
            else:
                return str(rendered)
        raise RequestError(f"the chat template of {self._path} refuses the messages: {refused}")

    def _check_variables(self, rendering: Rendering) -> None:
        """Refuse variables that would be settings of whoever renders the template."""
        settings = inspect.signature(self._tokenizer.apply_chat_template).parameters.keys() | {"messages"}
        for name in rendering.chat_template_kwargs:
            if name in settings - {"tools", "documents"}:
                raise RequestError(
                    f"chat_template_kwargs has {name!r}, which is no variable of a chat template"
                )

    def _protect(self, value: Any) -> Any:
        if isinstance(value, str):
            _check_surrogates(value)
            return self._special.protect(value)
        if isinstance(value, Mapping):
            return {key: self._protect(entry) for key, entry in value.items()}
        return [self._protect(entry) for entry in value] if isinstance(value, list | tuple) else value


def _check_surrogates(text: str, where: str = "") -> None:
    """Raise `RequestError` for half of a UTF-16 pair, which no encoding of text can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise RequestError(
            f"{where}the text has a lone surrogate, U+{ord(text[e.start]):04X}, at character {e.start}"
        ) from None


@contextlib.contextmanager
def _without_framework_advice() -> Iterator[None]:
    """Drop the line that transformers logs at import where PyTorch is not installed: none is needed."""

    def keep(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger = logging.getLogger("transformers")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
