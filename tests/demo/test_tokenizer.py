import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from jdllm.demo import tokenizer as demo
from jdllm.demo.tasks import TASKS, distinct_instances


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    directory = tmp_path_factory.mktemp("tokenizer")
    demo.write_tokenizer(directory)
    return PreTrainedTokenizerFast.from_pretrained(directory)


# Specials are matched in the text first, so a text that spells one out is encoded as that token.
TEXTS = st.text().filter(lambda text: not any(name in text for name in demo.SPECIAL_TOKENS))


@given(TEXTS)
def test_every_text_round_trips(tokenizer: PreTrainedTokenizerFast, text: str):
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", [" ", "\n\n", " a  b ", "x .", "don 't", "naïve 字 🙂"])
def test_spaces_survive(tokenizer: PreTrainedTokenizerFast, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens(tokenizer: PreTrainedTokenizerFast):
    assert len(tokenizer) == demo.VOCAB_SIZE == 262
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 257)
    assert tokenizer.mask_token_id == demo.MASK == 261
    for name, number in demo.SPECIAL_TOKENS.items():
        assert tokenizer.encode(f"a{name}b") == [97, number, 98]
    assert tokenizer.decode([97, demo.EOT, demo.EOS], skip_special_tokens=True) == "a"


@pytest.mark.parametrize("task", TASKS)
def test_training_ids_are_the_tokenizers(tokenizer: PreTrainedTokenizerFast, task: str):
    (instance,) = distinct_instances(task, "test", 1, seed=0)
    messages = [{"role": "user", "content": instance.prompt}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert encoded == demo.chat_ids(instance.prompt)
    assert len(demo.chat_ids("")) == demo.CHAT_OVERHEAD
    assert tokenizer.encode(instance.prompt) == demo.plain_ids(instance.prompt)


def test_chat_template_text(tokenizer: PreTrainedTokenizerFast):
    messages = [
        {"role": "user", "content": "1+2="},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "2+2="},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\n1+2=<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n3<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n2+2=<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_answers_end_at_the_first_end_token():
    assert demo.answer_text([*b"42", demo.EOS, *b"7"]) == "42"
    assert demo.answer_text([*b"42", demo.EOT, demo.EOS]) == "42"
    assert demo.answer_text([*b"4", demo.MASK, *b"2"]) == "42"
    assert demo.answer_text([demo.EOS]) == ""
