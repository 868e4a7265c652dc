"""Tokenizers of GGUF files: their ids are those of the `tokenizer.json` that the files were made from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Raw
from transformers import Qwen2Tokenizer

from jdllm.checkpoints.conversion import to_native
from jdllm.checkpoints.tokenizer import Tokenizer, load_tokenizer
from jdllm.errors import CheckpointError
from jdllm.models.hf_config import config_from_hf
from tests.checkpoints.gguf_writer import write_gguf
from tests.helpers import GOLDENS

TEXTS = [
    "The quick brown fox can't jump over 13 lazy dogs; it's 2024-01-05, and WE'LL see.",
    "def f(x):\n    return x ** 2  # squares\n\n\tif x == 10000: pass\r\n",
    "Ça coûte 1 234,50 € à l'hôtel — e\u0301te\u0301 décomposé",
    "我想在apple工作1314151天, 漢字かな交じり文",
    "  leading and trailing   \n \n\n x",
    "<|im_start|>user\nhello<|im_end|> world <tool> x",
]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
LING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|"
    r"\s+(?!\S)|\s+"
)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def trained(pattern: str | None, *, composed: bool = False, whole: bool = False) -> Raw:
    """A byte-level tokenizer in the form of a published `tokenizer.json`, with pairs across its cuts.

    With `whole` the vocabulary has tokens that no pairs make.
    """
    raw = Raw(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train_from_iterator([part for text in TEXTS for part in (text, *text.split())], trainer)
    if whole:
        parsed = json.loads(raw.to_str())
        parsed["model"] |= {"ignore_merges": True, "merges": parsed["model"]["merges"][:150]}
        raw = Raw.from_str(json.dumps(parsed))
    if pattern is None:
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        cut = pre_tokenizers.Split(Regex(pattern), "isolated")
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        raw.pre_tokenizer = pre_tokenizers.Sequence([cut, spell])
    if composed:
        raw.normalizer = normalizers.NFC()
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(CONTROL)
    raw.add_tokens(["<tool>"])
    return raw


def qwen2() -> Raw:
    """As transformers builds it of a vocabulary and pairs."""
    parsed = json.loads(trained(None).to_str())["model"]
    merges: Any = [tuple(pair) for pair in parsed["merges"]]
    raw = Qwen2Tokenizer(vocab=parsed["vocab"], merges=merges).backend_tokenizer
    raw.add_special_tokens(CONTROL)
    raw.add_tokens(["<tool>"])
    return raw


def pieces() -> Raw:
    """Of Llama 2 and Mistral: pieces with a space before the text, and bytes for what is no piece."""
    space = "\u2581"
    raw = Raw(models.BPE())
    raw.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, special_tokens=special)
    raw.train_from_iterator([text for text in TEXTS[:2] for _ in range(2)], trainer)
    parsed = json.loads(raw.to_str())["model"]
    merges = [tuple(pair) for pair in parsed["merges"]]
    made = Raw(models.BPE(parsed["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = raw.normalizer
    back = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(back)
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return made


def with_bos(raw: Raw) -> Raw:
    token = CONTROL[0]
    raw.post_processor = processors.TemplateProcessing(
        f"{token} $A", special_tokens=[(token, raw.token_to_id(token))]
    )
    return raw


def metadata(raw: Raw, pre: str, **others: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes of a tokenizer, with an unused token at the end."""
    parsed = json.loads(raw.to_str())
    added = {entry["content"]: entry["special"] for entry in parsed["added_tokens"]}
    tokens = [token for token, _ in sorted(raw.get_vocab().items(), key=lambda item: item[1])]
    assert [raw.token_to_id(token) for token in tokens] == list(range(len(tokens)))
    normal, control, user, unused = 1, 3, 4, 5
    kinds = [(control if added[token] else user) if token in added else normal for token in tokens]
    merges = [" ".join(pair) for pair in parsed["model"]["merges"]]
    found = {"model": "gpt2", "pre": pre, "tokens": [*tokens, f"[PAD{len(tokens)}]"]}
    found |= {"token_type": [*kinds, unused], "merges": merges} | others
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def piece_metadata(raw: Raw) -> dict[str, Any]:
    """A score is that of the pair that makes a piece: the earlier, the higher."""
    values = metadata(raw, "default")
    scores = dict.fromkeys(values["tokenizer.ggml.tokens"], -1e6)
    for rank, pair in enumerate(values.pop("tokenizer.ggml.merges")):
        scores.setdefault("".join(pair.split(" ")), 0.0)
        scores["".join(pair.split(" "))] = -float(rank)
    kinds = values["tokenizer.ggml.token_type"]
    kinds[0], kinds[3:259] = 2, [6] * 256
    more = {"model": "llama", "scores": list(scores.values()), "bos_token_id": 1, "eos_token_id": 2}
    more |= {"unknown_token_id": 0}
    return values | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def write(path: Path, values: dict[str, Any]) -> Path:
    write_gguf(GOLDENS / "llama", path / "model.gguf", values=values)
    return path / "model.gguf"


def loaded(path: Path) -> Tokenizer:
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    return tokenizer


Make = Callable[[], tuple[Raw, dict[str, Any]]]


def _llama3() -> tuple[Raw, dict[str, Any]]:
    raw = trained(LLAMA3, whole=True)
    return with_bos(raw), metadata(raw, "llama-bpe", bos_token_id=raw.token_to_id(CONTROL[0]))


def _qwen2() -> tuple[Raw, dict[str, Any]]:
    raw = qwen2()
    return raw, metadata(raw, "qwen2", bos_token_id=raw.token_to_id(CONTROL[0]))


def _llada() -> tuple[Raw, dict[str, Any]]:
    raw = trained(LING, composed=True)
    bos = raw.token_to_id(CONTROL[0])
    return with_bos(raw), metadata(raw, "bailingmoe", bos_token_id=bos, add_bos_token=True)


def _gpt2() -> tuple[Raw, dict[str, Any]]:
    raw = trained(None)
    return raw, metadata(raw, "gpt-2")


def _pieces() -> tuple[Raw, dict[str, Any]]:
    raw = pieces()
    return raw, piece_metadata(raw)


@pytest.mark.parametrize("make", [_llama3, _qwen2, _llada, _gpt2, _pieces])
def test_ids_and_texts_are_those_of_the_original(make: Make, tmp_path: Path):
    raw, values = make()
    tokenizer = loaded(write(tmp_path, values))
    assert len(tokenizer) == raw.get_vocab_size()
    for text in TEXTS:
        ids = raw.encode(text).ids
        assert tokenizer.encode(text, parse_special=True) == ids, text
        assert tokenizer.decode(ids) == raw.decode(ids), text


def test_the_texts_tell_the_forms_apart():
    raws = [trained(LLAMA3), trained(LLAMA3, whole=True), qwen2(), trained(None)]
    ids = [[raw.encode(text).ids for text in TEXTS] for raw in raws]
    assert all(a != b for i, a in enumerate(ids) for b in ids[:i])


@pytest.mark.parametrize("family", ["qwen2", "llada"])
def test_special_tokens_and_the_template_come_from_the_metadata(family: str, tmp_path: Path):
    raw = qwen2()
    names = {"eos": "<|endoftext|>", "eot": "<|im_end|>", "mask": "<|mask|>"}
    ids = {name: raw.token_to_id(token) for name, token in names.items()}
    values = metadata(raw, "qwen2") | {f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items()}
    file = tmp_path / "model.gguf"
    write_gguf(GOLDENS / family, file, values=values | {"tokenizer.chat_template": TEMPLATE})
    config, tokenizer = config_from_hf(file), loaded(file)
    assert config.mask_id == ids["mask"]
    assert config.stop_ids == (ids["eos"], ids["eot"])
    assert (tokenizer.eos_id, tokenizer.special_tokens["mask_token"]) == (ids["eos"], "<|mask|>")
    text, encoded = tokenizer.encode_chat([{"role": "user", "content": "fox<|im_end|>"}])
    assert text == "<|im_start|>user\nfox<|im_end|><|im_end|>\n"
    special = {raw.token_to_id(token) for token in CONTROL}
    assert [i for i in encoded if i in special] == [raw.token_to_id("<|im_start|>"), ids["eot"]]


def test_a_tokenizer_beside_the_file_goes_before_its_own(tmp_path: Path):
    file = write(tmp_path, metadata(trained(LLAMA3), "unheard-of"))
    with pytest.raises(
        CheckpointError,
        match=r"tokenizer.ggml.pre 'unheard-of': .*put the tokenizer.json and tokenizer_config",
    ):
        load_tokenizer(file)
    raw = trained(None)
    raw.save(str(tmp_path / "tokenizer.json"))
    assert [loaded(file).encode(text, parse_special=True) for text in TEXTS] == [
        raw.encode(text).ids for text in TEXTS
    ]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model 't5'"),
        ({"model": "llama"}, "model.gguf lacks tokenizer.ggml.scores"),
        ({"pre": "default"}, "tokenizer.ggml.pre 'default'"),
        ({"bos_token_id": 100000}, "cannot be read"),
        ({"token_type": [1, 1]}, "cannot be read"),
        ({"merges": ["nothing of-this"]}, "cannot be read"),
    ],
)
def test_a_tokenizer_that_is_not_followed_is_refused(values: dict[str, Any], told: str, tmp_path: Path):
    changes = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    file = write(tmp_path, metadata(trained(LLAMA3), "llama-bpe") | changes)
    with pytest.raises(CheckpointError, match=told) as refused:
        load_tokenizer(file)
    assert "\n" not in str(refused.value)


def test_a_file_without_tokens_has_no_tokenizer():
    assert load_tokenizer(GOLDENS / "quantised" / "llama.gguf") is None


@pytest.mark.parametrize("make", [_llama3, _qwen2, _pieces])
def test_a_converted_checkpoint_has_the_tokenizer(make: Make, tmp_path: Path):
    raw, values = make()
    file = write(tmp_path, values | {"tokenizer.chat_template": TEMPLATE})
    to_native(file, tmp_path / "native")
    tokenizer = loaded(tmp_path / "native")
    assert [tokenizer.encode(text, parse_special=True) for text in TEXTS] == [
        raw.encode(text).ids for text in TEXTS
    ]
    assert (tokenizer.chat_template, tokenizer.eos_id) == (TEMPLATE, loaded(file).eos_id)


def test_no_pair_of_pieces_makes_a_special_token(tmp_path: Path):
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "<", "s", ">", "s>", "<x", "x"]
    found = {"model": "llama", "pre": "default", "tokens": tokens, "token_type": [2, 3, 3, *[1] * 7]}
    found |= {"scores": [0.0, 0.0, 0.0, -9.0, -8.0, -7.0, -6.0, -1.0, -2.0, -5.0]}
    found |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    file = write(tmp_path, {f"tokenizer.ggml.{key}": value for key, value in found.items()})
    assert loaded(file).encode("<s><x") == [1, 3, 4, 7, 8]
