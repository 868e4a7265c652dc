"""The checkpoint's tokenizer and chat template."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jdllm.errors import CheckpointError, RequestError
from jdllm.models.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FILE = "tokenizer.json"
_BYTE_PAIR_FILES = ("vocab.json", "merges.txt")
_END_OF_TURN = "<|eot_id|>"


def load_tokenizer(path: str | Path) -> "Tokenizer | None":
    """Read the tokenizer of a checkpoint.

    Arguments:
    - `path`: the directory of the checkpoint.

    Returns the tokenizer, or `None` where the directory has neither `tokenizer.json` nor `vocab.json` with
    `merges.txt`, which are read as Qwen2's byte-pair encoding (Dream's): token ids still work.

    Raises `CheckpointError` for tokenizer files that cannot be read.
    """
    path = Path(path)
    single = (path / _FILE).is_file()
    if not single and not all((path / name).is_file() for name in _BYTE_PAIR_FILES):
        return None
    with _without_framework_advice():
        from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer
    try:
        reader = PreTrainedTokenizerFast if single else Qwen2Tokenizer
        return Tokenizer(path, reader.from_pretrained(path))
    except Exception as e:  # the library raises a bare Exception for a damaged file
        raise CheckpointError(f"the tokenizer files of {path} cannot be read: {e}") from None


def complete_ids(config: ModelConfig, tokenizer: "Tokenizer") -> ModelConfig:
    """Look up the mask and end-of-turn ids that a checkpoint's `config.json` does not state.

    Arguments:
    - `config`: the model; an id that it has is kept.
    - `tokenizer`: the checkpoint's; the family knows the text of its tokens.

    Returns the configuration with the ids that were found; the others stay `None`.
    """
    from jdllm.models.registry import FAMILIES

    family = FAMILIES[config.family]
    tokens = {"mask_id": family.mask_token, "eot_id": family.turn_end}
    absent = {key: token for key, token in tokens.items() if token and getattr(config, key) is None}
    return dataclasses.replace(config, **{key: tokenizer.token_id(token) for key, token in absent.items()})


class Tokenizer:
    """Text to token ids and back, as the checkpoint defines it.

    Arguments:
    - `path`: the directory it comes from, for messages.
    - `tokenizer`: the tokenizer of transformers.
    """

    def __init__(self, path: Path, tokenizer: "PreTrainedTokenizerFast"):
        self._path = path
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        """Number of ids that it defines; the model's vocabulary may be larger."""
        return len(self._tokenizer)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token that it defines, with its id."""
        return self._tokenizer.get_vocab()

    @property
    def eot_id(self) -> int | None:
        """Id of `<|eot_id|>`, which ends a turn, or `None`; LLaDA's `config.json` does not state it."""
        return self.token_id(_END_OF_TURN)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its exact text, or `None` where it is not in the vocabulary."""
        return self._tokenizer.get_vocab().get(token)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer adds by itself.

        They are not added to a text that begins with the BOS token, as a rendered chat template does.
        """
        bos = self._tokenizer.bos_token
        special = not (bos and text.startswith(str(bos)))
        return self._tokenizer.encode(text, add_special_tokens=special)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; ids that the tokenizer does not define give no text."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render a conversation up to the point where the model's answer begins.

        Arguments:
        - `messages`: objects with `role` and `content`, both text.

        Returns the text to `encode`.

        Raises `RequestError` where the checkpoint has no chat template (base models have none), or the
        template refuses the messages.
        """
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise RequestError(
                f"the tokenizer of {self._path} has no chat template: give the prompt as plain text"
            )
        if not messages:
            raise RequestError("there is no message to answer: give at least one")
        for i, message in enumerate(messages):
            fields = message if isinstance(message, Mapping) else {}
            if not all(isinstance(fields.get(key), str) for key in ("role", "content")):
                raise RequestError(
                    f"message {i} is {message!r}, expected an object with texts 'role' and 'content'"
                )
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as e:
            raise RequestError(f"the chat template of {self._path} refuses the messages: {e}") from None
        return str(rendered)


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
