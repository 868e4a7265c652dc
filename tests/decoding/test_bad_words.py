"""Words that a text may not have: their ids, and models that denoise."""

from typing import Any

import numpy as np
import pytest

from jdllm.decoding.bad_words import banned_words, spelled
from jdllm.decoding.controls import control_of
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig

PIECES = {1: "foo", 2: " foo", 3: "b", 4: "ar", 5: " ", 6: "?"}


def encode(text: str) -> list[int]:
    """The longest piece first; what no piece has is a question mark."""
    ids = []
    while text:
        fitting = [id for id, piece in PIECES.items() if text.startswith(piece)]
        best = max(fitting, key=lambda id: len(PIECES[id]), default=6)
        ids.append(best)
        text = text[len(PIECES[best]) if fitting else 1 :]
    return ids


def banning(words: Any, **options: Any) -> SamplingParams:
    """Whatever form the words have."""
    return SamplingParams(bad_words=words, **options)


def decode(ids: Any) -> str:
    return "".join(PIECES[id] for id in ids)


def test_texts_as_they_stand_and_behind_a_space():
    asked = banning(["foo", "bar", (4, 4)], max_tokens=7)
    words = spelled(asked, encode, decode)
    assert words == asked.changed(bad_words=((1,), (2,), (3, 4), (5, 3, 4), (4, 4)))
    assert spelled(words, encode, decode) is words
    assert spelled(banning(" "), encode, decode).bad_words == ((5,),)


def test_words_that_hold_another_word_need_no_ban(config: ModelConfig):
    asked = banning([(1,), (3, 4), (5, 1), (3, 4), (2, 3)])
    assert banned_words(asked, config, in_order=True) == [(1,), (3, 4), (2, 3)]


@pytest.mark.parametrize("word", ["ö", "foo!", "bar\n"])
def test_a_text_that_no_tokens_spell(word: str):
    with pytest.raises(RequestError, match=r"bad_words has .*, which the tokenizer cannot write"):
        spelled(banning(word), encode, decode)


def test_models_that_denoise_ban_tokens(llm: LLM):
    [free] = llm.generate(
        prompt_token_ids=[[1, 2, 3]], sampling=SamplingParams(gen_length=8, early_stop=False)
    )
    banned = [(token,) for token in set(free.token_ids)]
    asked = banning(banned, gen_length=8, early_stop=False)
    allowed = np.setdiff1d(np.arange(llm.config.vocab_size), banned)
    both = [asked, asked.changed(bad_words=(), allowed_token_ids=allowed)]
    found, expected = llm.generate(prompt_token_ids=[[1, 2, 3]] * 2, sampling=both)
    assert found.token_ids == expected.token_ids
    assert not set(found.token_ids) & set(free.token_ids)


WRONG: dict[str, tuple[Any, str]] = {
    "text": ("foo", "bad_words has the text 'foo', which needs tokenizer files"),
    "outside": ([[512]], "bad_words has 512, outside the vocabulary .0 to 511"),
    "several tokens": (
        [[3, 4]],
        "bad_words has a word of 2 tokens .3, 4.: only requests that generate one token",
    ),
    "no id left": ([[i] for i in range(512)], "leaves no token"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_model_that_denoises_refuses(llm: LLM, case: str):
    words, message = WRONG[case]
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt_token_ids=[[1]], sampling=banning(words, gen_length=4))


@pytest.mark.parametrize("words", [[5, 6], [""], [[]], [["a"]], [[-1]], 5, [True]], ids=str)
def test_what_is_no_word(words: Any):
    with pytest.raises(RequestError, match="bad_words is"):
        banning(words)


def test_words_that_are_too_many_or_too_long(config: ModelConfig):
    for words in ([(1,) * 33], [(1, i) for i in range(2, 300)]):
        with pytest.raises(RequestError, match="expected at most 256 of at most 32"):
            banned_words(banning(words), config, in_order=True)


def test_last_tokens_must_leave_an_allowed_one(config: ModelConfig):
    """Else no id would be left behind the first tokens of a word."""
    asked = banning([(5, 3), (5, 4)], allowed_token_ids=(3, 4))
    with pytest.raises(RequestError, match="leaves no token"):
        control_of(asked, config, 512, (), in_order=True)
