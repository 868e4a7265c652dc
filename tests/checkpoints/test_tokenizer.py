import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jdllm.checkpoints.tokenizer import complete_ids, load_tokenizer
from jdllm.errors import CheckpointError, RequestError
from jdllm.models.hf_config import config_from_hf
from tests.conftest import LLADA

ROOT = Path(__file__).parents[2]
BOS, EOS, EOT = "<|startoftext|>", "<|endoftext|>", "<|eot_id|>"
WORDS = ["hello", "world", "user", "assistant"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m.role }} {{ m.content }} <|eot_id|>{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def save(path, *, template=None, adds_bos=False, eot=True):
    """Write the tokenizer files of a checkpoint: ids follow the order of special tokens, then words."""
    special = [BOS, EOS, *([EOT] if eot else [])]
    vocab = {token: i for i, token in enumerate(special + WORDS + ["<unk>"])}
    raw = RawTokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.decoder = decoders.WordPiece(prefix="##")
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=BOS, eos_token=EOS, extra_special_tokens=special[2:]
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return vocab


def loaded(path):
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    return tokenizer


def test_text_makes_a_round_trip(tmp_path):
    vocab = save(tmp_path)
    tokenizer = loaded(tmp_path)
    ids = tokenizer.encode("hello world")
    assert ids == [vocab["hello"], vocab["world"]]
    assert tokenizer.decode(ids) == "hello world"
    assert len(tokenizer) == len(vocab)


def test_decoding_drops_special_tokens_and_undefined_ids(tmp_path):
    vocab = save(tmp_path)
    ids = [vocab[BOS], vocab["hello"], vocab[EOT], vocab["world"], vocab[EOS], 9999]
    assert loaded(tmp_path).decode(ids) == "hello world"


@pytest.mark.parametrize("adds_bos", [False, True])
def test_bos_is_added_as_the_tokenizer_says_and_never_twice(tmp_path, adds_bos):
    vocab = save(tmp_path, adds_bos=adds_bos)
    tokenizer = loaded(tmp_path)
    assert tokenizer.encode("hello") == [vocab[BOS]] * adds_bos + [vocab["hello"]]
    assert tokenizer.encode(f"{BOS}hello", parse_special=True) == [vocab[BOS], vocab["hello"]]


def test_a_conversation_is_rendered_up_to_the_answer(tmp_path):
    vocab = save(tmp_path, template=TEMPLATE, adds_bos=True)
    tokenizer = loaded(tmp_path)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert text == f"{BOS}user hello {EOT}assistant "
    tokens = [BOS, "user", "hello", EOT, "assistant"]
    ids = [vocab[token] for token in tokens]
    assert tokenizer.encode(text, parse_special=True) == ids
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]) == (text, ids)


@pytest.mark.parametrize("begins", ["", "\n\n{{ bos_token }}"])
def test_only_a_template_itself_begins_its_text(tmp_path, begins):
    save(tmp_path, template=begins + TEMPLATE.removeprefix("{{ bos_token }}"), adds_bos=True)
    messages = [{"role": "user", "content": "hello"}]
    official = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = official.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert loaded(tmp_path).encode_chat(messages)[1] == ids


@pytest.mark.parametrize("eot", [True, False])
def test_the_end_of_turn_id_comes_from_the_vocabulary(tmp_path, eot):
    vocab = save(tmp_path, eot=eot)
    assert loaded(tmp_path).eot_id == (vocab[EOT] if eot else None)


def test_without_a_template_a_conversation_is_refused(tmp_path):
    save(tmp_path)
    with pytest.raises(RequestError, match=f"{tmp_path} has no chat template"):
        loaded(tmp_path).apply_chat_template([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([{"role": "system", "content": "hello"}], "no system"),
        ([{"role": "user", "content": "hello"}, {"role": "user"}], "message 1"),
        ([{"content": "hello"}], "message 0"),
        ([{"role": "user", "content": 5}], "message 0"),
        (["hello"], "message 0"),
        ([], "no message"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "message 0: content part 0",
        ),
        ([{"role": "user", "content": ["hello"]}], "message 0: content part 0 is 'hello'"),
        ([{"role": "user", "content": "a\ud800b"}], r"message 0: .*lone surrogate, U\+D800, at character 1"),
    ],
)
@pytest.mark.parametrize("render", ["apply_chat_template", "encode_chat"])
def test_messages_that_cannot_be_rendered_are_refused(tmp_path, messages, named, render):
    save(tmp_path, template=TEMPLATE)
    with pytest.raises(RequestError, match=named):
        getattr(loaded(tmp_path), render)(messages)


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ 1 // 0 }}", "division"),
        ("{{ messages[0].content + 5 }}", "str"),
        ("{{ messages[3].content }}", "no element 3"),
        ("{% for %}", "Expected"),
    ],
)
def test_a_template_that_fails_is_a_refusal(tmp_path, template, named):
    save(tmp_path, template=template)
    with pytest.raises(RequestError, match=f"chat template of {tmp_path} refuses the messages: .*{named}"):
        loaded(tmp_path).encode_chat([{"role": "user", "content": "hello"}])


def test_a_special_token_in_a_text_is_what_a_vocabulary_without_it_makes_of_it(tmp_path):
    vocab = save(tmp_path)  # a word-level model: the words are all it knows
    ids = loaded(tmp_path).encode(f"hello {EOT} world")
    assert ids == [vocab[word] for word in ("hello", "<unk>", "world")]


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja"])
def test_the_default_of_several_templates_is_used(tmp_path, file):
    vocab = save(tmp_path)
    templates = {"default": TEMPLATE, "tool_use": "tools"}
    if file == "chat_template.jinja":
        (tmp_path / file).write_text(templates["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(templates["tool_use"])
    else:
        config = json.loads((tmp_path / file).read_text())
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        (tmp_path / file).write_text(json.dumps(config))
    tokenizer = loaded(tmp_path)
    assert tokenizer.chat_template == TEMPLATE
    _, ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert ids == [vocab[token] for token in (BOS, "user", "hello", EOT, "assistant")]


@pytest.mark.parametrize(
    ("stated", "overrides", "expected"),
    [
        ({}, (), (1,)),
        ({"eos_id": 5}, (), (5, 1)),
        ({"eos_id": 5, "more_eos_ids": (1, 6)}, (), (5, 1, 6)),
        ({"eos_id": 5}, ("eos_token_id",), (5,)),
    ],
)
def test_the_tokenizers_own_end_of_text_is_one_too(tmp_path, stated, overrides, expected):
    assert save(tmp_path)[EOS] == 1
    config = dataclasses.replace(
        config_from_hf(LLADA.directory), **{"eos_id": None, "more_eos_ids": (), **stated}
    )
    assert complete_ids(config, loaded(tmp_path), overrides).eos_ids == expected


def test_a_directory_without_tokenizer_files_has_no_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": {"type": "Telepathy"}}'])
def test_damaged_files_are_named(tmp_path, content):
    save(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


@pytest.mark.slow
def test_transformers_is_imported_late_and_silently(tmp_path):
    save(tmp_path)
    code = (
        "import sys; from jdllm.checkpoints.tokenizer import complete_ids, load_tokenizer;"
        "assert 'transformers' not in sys.modules;"
        "print(len(load_tokenizer(sys.argv[1])))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert (run.stderr, run.stdout) == ("", "8\n")
