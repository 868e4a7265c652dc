"""The demo's tokenizer: one token per UTF-8 byte, so that every text round-trips exactly.

The id of a byte is its value; an ASCII character is one token. The six special tokens follow. No token is
added on encoding: the model works from a plain prompt such as `123+4567=`, answers and then fills the
response with end-of-sequence tokens. Part of the training prompts comes wrapped in the chat template
below instead, and there the answer ends with `<|eot_id|>`, so that the chat endpoint works as well.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, START_HEADER, END_HEADER, EOT, MASK = range(256, 262)

SPECIAL_TOKENS: dict[str, int] = {
    "<|startoftext|>": BOS,
    "<|endoftext|>": EOS,
    "<|start_header_id|>": START_HEADER,
    "<|end_header_id|>": END_HEADER,
    "<|eot_id|>": EOT,
    "<|mdm_mask|>": MASK,
}

VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{{ '<|startoftext|>' }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{ message['content'] + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

_CHAT_PREFIX = [BOS, START_HEADER, *b"user", END_HEADER, *b"\n\n"]
_CHAT_SUFFIX = [EOT, START_HEADER, *b"assistant", END_HEADER, *b"\n\n"]

CHAT_OVERHEAD = len(_CHAT_PREFIX) + len(_CHAT_SUFFIX)
"""Tokens that the chat template adds to a prompt of one user message."""


def plain_ids(text: str) -> list[int]:
    """Ids of a text that holds no special token."""
    return list(text.encode())


def chat_ids(prompt: str) -> list[int]:
    """Ids of the chat template around one user message, with the generation prompt."""
    return [*_CHAT_PREFIX, *prompt.encode(), *_CHAT_SUFFIX]


def answer_text(ids: list[int]) -> str:
    """The text before the first end-of-sequence or end-of-turn id; other special tokens are left out."""
    end = next((i for i, token in enumerate(ids) if token in (EOS, EOT)), len(ids))
    return bytes(token for token in ids[:end] if token < 256).decode(errors="replace")


def build_tokenizer() -> Tokenizer:
    """The tokenizer as a `tokenizers.Tokenizer`."""
    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def write_tokenizer(directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` for `PreTrainedTokenizerFast.from_pretrained`."""
    build_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|mdm_mask|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 bytes stand for themselves, the others for the characters from 256 on, in order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
