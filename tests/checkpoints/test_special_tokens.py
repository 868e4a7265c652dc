"""What a user writes never becomes a special token; what the template writes does."""

import functools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import jdllm.demo
from jdllm.checkpoints.tokenizer import Tokenizer, load_tokenizer
from jdllm.demo import tokenizer as demo

DIRECTORY = Path(jdllm.demo.__file__).parent / "checkpoint"
SPECIAL = list(demo.SPECIAL_TOKENS)
PIECES = [
    *SPECIAL,
    "<",
    "<|",
    "|>",
    "<|eot",
    "_id|>",
    "\ufdd0",
    "\U00100000",
    "\U00100001",
    "é",
    " a\n",
    "1+1=",
]
texts = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = load_tokenizer(DIRECTORY)
    assert found is not None
    return found


@given(texts)
@example("<|mdm_mask|>")
def test_text_stays_text(tokenizer: Tokenizer, text: str):
    assert tokenizer.encode(text) == list(text.encode())  # a token a byte, as the bundled model has it


@given(texts)
def test_tokens_that_are_asked_for_are_parsed_and_no_other(tokenizer: Tokenizer, text: str):
    mask = "<|mdm_mask|>"
    expected = [i for part in text.split(mask) for i in (*part.encode(), demo.MASK)][:-1]
    assert tokenizer.encode(text, parsed=[mask]) == expected


@given(texts, texts, texts)
@example("<|eot", "_id|>", "<|mdm_mask|>")
def test_only_the_template_is_special(tokenizer: Tokenizer, first: str, second: str, third: str):
    content = [{"type": "text", "text": first}, {"type": "text", "text": second}]
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": second},
        {"role": "user", "content": third},
    ]
    expected = [demo.BOS]
    for role, said in (("user", f"{first}\n{second}"), ("assistant", second), ("user", third)):
        expected += [demo.START_HEADER, *role.encode(), demo.END_HEADER, *b"\n\n", *said.encode(), demo.EOT]
    expected += [demo.START_HEADER, *b"assistant", demo.END_HEADER, *b"\n\n"]
    rendered, ids = tokenizer.encode_chat(messages)
    assert ids == expected
    plain = [
        {**m, "content": c} for m, c in zip(messages, (f"{first}\n{second}", second, third), strict=True)
    ]
    assert rendered == tokenizer.apply_chat_template(plain)


@given(st.lists(st.text(st.characters(exclude_characters="<|", exclude_categories=["Cs"])), min_size=1))
def test_a_conversation_without_special_tokens_is_encoded_as_transformers_does(
    tokenizer: Tokenizer, contents: list[str]
):
    messages = [{"role": "user", "content": content} for content in contents]
    official = AutoTokenizer.from_pretrained(DIRECTORY)
    ids = official.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.encode_chat(messages)[1] == ids


def test_a_template_that_trims_or_joins_content_makes_nothing_special(tmp_path: Path):
    """The end of one message and the start of the next would be a token together."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((DIRECTORY / name).read_text())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}{{ m.content | trim }}{% endfor %}<|eot_id|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    messages = [{"role": "user", "content": text} for text in (" hi <|eot", "_id|> ", " there ")]
    assert tokenizer.encode_chat(messages)[1] == [*b"hi <|eot_id|>there", demo.EOT]


def test_joint_encoding_is_not_cut_where_text_is_protected(tmp_path: Path):
    """Merges across the ends of a message are those of the whole text."""
    vocab = {token: i for i, token in enumerate(["<", "|", "x", ">", "a", "b", "c", ">b", "c>"])}
    raw = RawTokenizer(models.BPE(vocab, merges=[(">", "b"), ("c", ">")]))
    raw.pre_tokenizer = pre_tokenizers.Split("z", "removed")
    raw.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|x|>")
    fast.chat_template = "a<|x|>c{{ messages[0].content }}b"
    fast.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    _, ids = tokenizer.encode_chat([{"role": "user", "content": ">a<|x|>"}])
    names = ["a", "<|x|>", "c>", "a", "<", "|", "x", "|", ">b"]
    assert ids == [tokenizer.token_id(name) for name in names]


NORMALIZERS = {
    "none": None,
    "lower case": normalizers.Lowercase(),
    "compatible forms": normalizers.NFKC(),
    "sentencepiece": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "bert": normalizers.BertNormalizer(),
}
ENDS = [
    "<|im_end|>",
    " <|im_end|> ",
    "<|IM_end|>",
    "\N{FULLWIDTH LESS-THAN SIGN}|im_end|>",
    "<|im",
    "_end|>",
    "\ufdd0<|im_end|>",
    "<|x|>",
]
said = st.lists(st.sampled_from([*ENDS, "a", " ", "é", "B"]), max_size=5).map("".join)


def saved(directory: Path, raw: RawTokenizer, template: str | None = None, **config: Any) -> Tokenizer:
    """The tokenizer of a directory that it is written into."""
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, **config)
    fast.chat_template = template
    fast.save_pretrained(directory)
    found = load_tokenizer(directory)
    assert found is not None
    return found


@functools.cache
def bytewise(normalizer: str, normalized: bool, special: bool) -> RawTokenizer:
    """A token a byte, and two special tokens."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    raw = RawTokenizer(models.BPE(vocab, [], byte_fallback=True))
    if NORMALIZERS[normalizer]:
        raw.normalizer = NORMALIZERS[normalizer]
    raw.decoder = decoders.ByteFallback()
    if special:
        tokens = [AddedToken(t, normalized=normalized, special=True) for t in ("<|im_end|>", "<|x|>")]
        raw.add_special_tokens(tokens)
    return raw


@functools.cache
def speaking(normalizer: str, normalized: bool) -> tuple[Tokenizer, Any]:
    """A tokenizer with a template, and the same of transformers."""
    turns = "{% for m in messages %}{{ m.content }} <|im_end|>{% endfor %}"
    with tempfile.TemporaryDirectory() as directory:
        ours = saved(
            Path(directory), bytewise(normalizer, normalized, special=True), turns, eos_token="<|im_end|>"
        )
        return ours, AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@given(text=said)
@settings(max_examples=30)
def test_text_is_cut_as_by_a_tokenizer_without_special_tokens(normalizer: str, normalized: bool, text: str):
    tokenizer, _ = speaking(normalizer, normalized)
    assert tokenizer.encode(text) == bytewise(normalizer, normalized, special=False).encode(text).ids


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@given(texts=st.lists(said, min_size=1, max_size=3))
@settings(max_examples=30)
def test_no_message_forges_what_ends_it(normalizer: str, normalized: bool, texts: list[str]):
    tokenizer, official = speaking(normalizer, normalized)
    messages = [{"role": "user", "content": text} for text in texts]
    _, ids = tokenizer.encode_chat(messages)
    special = [token for token in map(tokenizer.token, ids) if token in ("<|im_end|>", "<|x|>")]
    assert special == ["<|im_end|>"] * len(texts)
    plain = [{"role": "user", "content": re.sub("[^ aB]", "", text)} for text in texts]
    assert tokenizer.encode_chat(plain)[1] == official.apply_chat_template(plain)["input_ids"]


@pytest.mark.parametrize(
    "text", ["a</s>b", "\N{FULLWIDTH LESS-THAN SIGN}/s\N{FULLWIDTH GREATER-THAN SIGN}", "</s> abc"]
)
def test_a_piece_of_the_vocabulary_that_reads_like_a_special_token_is_none(tmp_path: Path, text: str):
    """A Unigram vocabulary lists its special tokens, and finds them in a text as it finds all others."""

    def unigram(end: str) -> RawTokenizer:
        pieces = ["<unk>", end, *"▁<>/sabc"]
        raw = RawTokenizer(models.Unigram([(piece, -1.0 - i) for i, piece in enumerate(pieces)], unk_id=0))
        raw.normalizer = normalizers.NFKC()
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        raw.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<unk>", end)])
        return raw

    tokenizer = saved(tmp_path, unigram("</s>"), unk_token="<unk>", eos_token="</s>")
    assert tokenizer.encode(text) == unigram("nothing of the kind").encode(text).ids
