"""A checkpoint whose tokenizer is `vocab.json` and `merges.txt`, as Dream's; and the ids it completes."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jdllm.checkpoints.tokenizer import complete_ids, load_tokenizer
from jdllm.errors import CheckpointError
from jdllm.models.hf_config import config_from_hf
from tests.helpers import Golden

ROOT = Path(__file__).parents[2]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "l d", "Ġw or", "Ġwor ld"]


def bytes_as_text() -> list[str]:
    """The alphabet of byte-level encodings: printable Latin-1 as it is, other bytes from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [chr(256 + i) for i in range(256 - len(plain))]
    return [chr(b) for b in plain] + shifted


@pytest.fixture
def directory(tmp_path) -> Path:
    """Files with the names and keys of the published Dream tokenizer."""
    tokens = bytes_as_text() + [merge.replace(" ", "") for merge in MERGES]
    vocab = {token: i for i, token in enumerate(tokens)}
    added = {str(len(vocab) + i): {"content": token, "special": True} for i, token in enumerate(SPECIAL)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]))
    config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": SPECIAL[1:3],
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "bos_token": SPECIAL[0],
        "chat_template": TEMPLATE,
        "eos_token": SPECIAL[0],
        "mask_token": SPECIAL[3],
        "model_max_length": 131072,
        "pad_token": SPECIAL[0],
        "tokenizer_class": "DreamTokenizer",
        "unk_token": None,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def loaded(directory: Path):
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


def test_text_is_merged_as_the_files_say(directory):
    tokenizer = loaded(directory)
    vocab = json.loads((directory / "vocab.json").read_text())
    ids = tokenizer.encode("hello world, hé")
    assert ids == [vocab[t] for t in ("hello", "Ġworld", ",", "Ġ", "h", "Ã", "©")]
    assert tokenizer.decode(ids) == "hello world, hé"
    assert len(tokenizer) == len(vocab) + len(SPECIAL)


def test_special_tokens_are_single_ids_and_no_text(directory):
    tokenizer = loaded(directory)
    first = len(json.loads((directory / "vocab.json").read_text()))
    ids = tokenizer.encode("hello<|mask|><|im_end|>", parse_special=True)
    assert ids[1:] == [first + 3, first + 2]
    assert tokenizer.decode(ids) == "hello"
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(prompt, parse_special=True)[0] == first + 1


def test_special_tokens_in_a_text_are_merged_like_any_text(directory):
    tokenizer = loaded(directory)
    vocab = json.loads((directory / "vocab.json").read_text())
    plain = [vocab[character] for character in "<|im_end|>"]
    assert tokenizer.encode("hello<|im_end|> world") == [vocab["hello"], *plain, vocab["Ġworld"]]
    _, ids = tokenizer.encode_chat([{"role": "user", "content": "hello<|im_end|> world"}])
    first = len(vocab)
    start, end = first + 1, first + 2
    assert (ids.count(start), ids.count(end)) == (2, 1)
    at = ids.index(vocab["hello"])
    assert ids[at : ids.index(end)] == [vocab["hello"], *plain, vocab["Ġworld"]]


@pytest.mark.parametrize("file", ["vocab.json", "merges.txt"])
def test_one_file_of_two_is_no_tokenizer(directory, file):
    (directory / file).unlink()
    assert load_tokenizer(directory) is None


def test_a_damaged_vocabulary_is_named(directory):
    (directory / "vocab.json").write_text("{")
    with pytest.raises(CheckpointError, match=str(directory)):
        load_tokenizer(directory)


@pytest.mark.slow
def test_it_is_read_silently(directory):
    code = (
        "import sys; from jdllm.checkpoints.tokenizer import load_tokenizer;"
        "print(len(load_tokenizer(sys.argv[1])))"
    )
    run = subprocess.run([sys.executable, "-c", code, directory], capture_output=True, text=True, cwd=ROOT)
    assert (run.stderr, run.stdout) == ("", f"{256 + len(MERGES) + len(SPECIAL)}\n")


# Ids that config.json lacks


def test_ids_that_the_configuration_lacks_are_looked_up(directory):
    tokenizer = loaded(directory)
    bare = dataclasses.replace(config_from_hf(Golden("dream").directory), mask_id=None)
    completed = complete_ids(bare, tokenizer)
    assert completed.mask_id == tokenizer.token_id("<|mask|>")
    assert completed.eot_id == tokenizer.token_id("<|im_end|>")
    assert completed.eos_ids == (*bare.eos_ids, tokenizer.eos_id)
    assert dataclasses.replace(completed, mask_id=None, eot_id=None, more_eos_ids=()) == bare


@pytest.mark.parametrize(
    ("family", "mask"), [("fast_dllm_v2", "|<MASK>|"), ("llada2", "<|mask|>"), ("sdar", "<|MASK|>")]
)
def test_the_mask_of_a_block_model_is_found_by_its_text(directory, family, mask):
    config = json.loads((directory / "tokenizer_config.json").read_text())
    added = config["added_tokens_decoder"]
    index = next(i for i, token in added.items() if token["content"] == "<|mask|>")
    added[index]["content"] = config["mask_token"] = mask
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    bare = dataclasses.replace(config_from_hf(Golden(family).directory), mask_id=None)
    assert complete_ids(bare, loaded(directory)).mask_id == int(index)


def test_ids_of_the_configuration_are_kept(directory):
    config = dataclasses.replace(config_from_hf(Golden("dream").directory), mask_id=5, eot_id=6)
    assert complete_ids(config, loaded(directory), ["eos_token_id"]) == config


@pytest.mark.parametrize("family", ["llada", "mistral"])
def test_tokens_that_a_tokenizer_or_family_has_not_give_no_id(directory, family):
    config = dataclasses.replace(config_from_hf(Golden(family).directory), mask_id=None)
    assert complete_ids(config, loaded(directory), ["eos_token_id"]) == config
