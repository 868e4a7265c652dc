"""Tokenizers of six kinds, and random texts of eight scripts for them."""

import random
from collections.abc import Callable, Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>"]
SCRIPTS = [
    "abcdefghij",
    "абвгдежзик",
    "αβγδεζηθικ",
    "אבגדהוזחטי",
    "ابتثجحخدذر",
    "कखगघचछजझटठ",
    "的一是不了人我在有他",
    "กขคงจฉชซญด",
]
SIGNS = ["😀", "👩\u200d🚀", "🏳️", "e\u0301", "€", ",", ".", "\n"]
ALPHABET = sorted({*"".join(SCRIPTS), *"".join(SIGNS), " ", "▁"})


def random_text(draw: random.Random) -> str:
    """Words, each of a script, with emoji and signs."""

    def word() -> str:
        if draw.random() < 0.25:
            return draw.choice(SIGNS)
        return "".join(draw.choices(draw.choice(SCRIPTS), k=draw.randint(1, 5)))

    return "".join(word() + draw.choice(["", " ", " ", "  "]) for _ in range(draw.randint(1, 8)))


def _bpe(alphabet: Iterable[str], words: Iterable[str], **options: bool) -> models.BPE:
    """A vocabulary of single characters, bytes where `options` say so, and the beginnings of some words."""
    vocab = {token: i for i, token in enumerate(SPECIAL)}
    if options:
        vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    words = list(words)
    for character in [*alphabet, *"".join(words)]:
        vocab.setdefault(character, len(vocab))
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        for i in range(1, len(word)):
            if word[: i + 1] not in vocab:
                merges[word[:i], word[i]] = None
                vocab[word[: i + 1]] = len(vocab)
    return models.BPE(vocab, list(merges), unk_token="<unk>", fuse_unk=True, **options)


def _words(space: str) -> list[str]:
    draw = random.Random(0)
    return [space + "".join(draw.choices(script, k=3)) for script in SCRIPTS for _ in range(12)]


def byte_level() -> Tokenizer:
    """As of Qwen, Llama 3 and LLaDA."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [spell.pre_tokenize_str(word)[0][0] for space in ("", " ") for word in _words(space)]
    raw = Tokenizer(_bpe(sorted(pre_tokenizers.ByteLevel.alphabet()), words))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return raw


def prefixed(words: int = 40) -> Tokenizer:
    """As of Llama 2: a space before a text, which a decoder takes away; bytes for what is not known."""
    raw = Tokenizer(_bpe("▁,.", _words("▁")[:words], byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return raw


def unprefixed() -> Tokenizer:
    """As of Gemma."""
    raw = Tokenizer(_bpe("▁,.", _words("▁")[:40], byte_fallback=True))
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return raw


def metaspace() -> Tokenizer:
    """As of Mistral, saved with `legacy` false."""
    raw = Tokenizer(_bpe(ALPHABET, _words("▁")))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    raw.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return raw


def bytes_only() -> Tokenizer:
    """The same, with hardly more than bytes."""
    return prefixed(words=1)


def word_pieces() -> Tokenizer:
    """As of BERT."""
    vocab = [*SPECIAL, *ALPHABET, *_words(""), *(f"##{character}" for character in ALPHABET)]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(vocab))}
    raw = Tokenizer(models.WordPiece(vocab, unk_token="<unk>", max_input_chars_per_word=100))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=True)
    return raw


KINDS: dict[str, Callable[[], Tokenizer]] = {
    kind.__name__: kind for kind in (byte_level, prefixed, unprefixed, metaspace, bytes_only, word_pieces)
}


def write_kind(directory: Path, kind: str, template: str | None = None) -> Tokenizer:
    """Write the tokenizer files of a checkpoint; returns the library's tokenizer."""
    raw = KINDS[kind]()
    raw.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    special = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, **special)
    fast.chat_template = template
    fast.save_pretrained(directory)
    return raw
