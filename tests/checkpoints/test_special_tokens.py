"""What a user writes never becomes a special token; what the template writes does."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
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
    from tokenizers import Tokenizer as RawTokenizer
    from tokenizers import decoders, models, pre_tokenizers

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
