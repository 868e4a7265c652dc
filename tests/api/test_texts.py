"""Texts of tokens of every kind of tokenizer, whole and in parts, held against the library's decoding."""

import dataclasses
import functools
import random
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer

from jdllm.api.answers import Pieces, chat_logprobs, completion_logprobs, sampled
from jdllm.api.text_stream import Delta, TextStream
from jdllm.checkpoints.tokenizer import Tokenizer, load_tokenizer
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo import checkpoint_path
from jdllm.models.hf_config import config_from_hf
from jdllm.outputs import CompletionOutput, request_output
from jdllm.serving.request import Request
from jdllm.serving.spec import RequestSpec, generation_spec
from jdllm.serving.updates import StepUpdate
from tests.token_kinds import KINDS, SPECIAL, random_text, write_kind

CONFIG = dataclasses.replace(
    config_from_hf(checkpoint_path()), vocab_size=4096, mask_id=4095, eos_id=2, eot_id=None
)


class Kind(NamedTuple):
    """A tokenizer, and the library's, which is the oracle."""

    ours: Tokenizer
    raw: RawTokenizer
    pieces: Pieces

    def whole(self, ids: list[int]) -> str:
        return self.raw.decode(ids, skip_special_tokens=True)


@functools.cache
def kind_of(name: str) -> Kind:
    with tempfile.TemporaryDirectory() as directory:
        raw, ours = write_kind(Path(directory), name), load_tokenizer(directory)
    assert ours is not None
    return Kind(ours, raw, Pieces(ours))


def check_cuts(kind: Kind, ids: list[int]) -> None:
    """Wherever the prompt ends: the answer is what it adds, and the offsets of tokens are places in it."""
    whole = kind.whole(ids)
    for cut in range(len(ids)):
        prompt, answer = ids[:cut], ids[cut:]
        before, text = kind.ours.decode(prompt, final=False), kind.ours.decode(answer, prompt)
        assert before + text == whole
        offsets = kind.ours.offsets(answer, prompt)
        assert offsets == sorted(offsets)
        for place in range(cut, len(ids), 3):
            told = kind.whole(ids[:place])
            if whole.startswith(told) and place:  # no character is cut here
                assert offsets[place - cut] == len(told) - len(before)
    spoken = [i for i in ids if i not in range(3)]
    told = b"".join(kind.pieces.bytes(i) for i in spoken).decode()
    assert told in (whole, f" {whole}")


def run(
    kind: Kind, prompt: list[int], answer: list[int], sizes: list[int], **options: Any
) -> tuple[RequestSpec, CompletionOutput, list[Delta]]:
    """A request that commits `answer`, so many tokens in each step; its output, and what its stream tells."""
    sampling = SamplingParams(gen_length=len(answer), logprobs=True, **options)
    spec = generation_spec(prompt, sampling, CONFIG, kind.ours.decode)
    request, stream, deltas = Request(spec), TextStream(spec, kind.ours), []
    for step, (at, size) in enumerate(zip(np.cumsum([0, *sizes]), sizes, strict=False)):
        if not request.finished:
            tokens = np.array(answer[at : at + size], np.int32)
            positions = np.arange(at, at + size) + len(prompt)
            logprobs = -positions.astype(np.float32)
            update = StepUpdate(0, step, positions, tokens, np.ones(size, bool), logprobs)
            request.advance(positions, tokens, logprobs)
            deltas.append(stream.take(update))
    sample = request_output(None, 0, [request], kind.ours.decode).outputs[0]
    return spec, sample, [*deltas, stream.finish(sample.text or "", len(sample.token_ids))]


def parts(draw: random.Random, total: int) -> list[int]:
    """Sizes that make a total."""
    ends = sorted({total, *draw.choices(range(1, total + 1), k=total // 2)})
    return np.diff([0, *ends]).tolist()


def check_answer(kind: Kind, ids: list[int], cut: int, draw: random.Random) -> None:
    """Whole and streamed, with log-probabilities."""
    prompt, answer = ids[:cut], ids[cut:]
    spec, sample, deltas = run(kind, prompt, answer, parts(draw, len(answer)))
    before, text = kind.ours.decode(prompt, final=False), sample.text or ""
    assert before + text == kind.whole(ids)
    assert "".join(delta.text for delta in deltas) == text
    whole = completion_logprobs(
        kind.pieces, *sampled(sample), kind.pieces.offsets(spec, sample.token_ids, text)
    )
    told = [completion_logprobs(kind.pieces, *delta.tokens) for delta in deltas]
    assert whole == {name: [entry for part in told for entry in part[name]] for name in whole}
    content = chat_logprobs(kind.pieces, *sampled(sample), 1)["content"]
    spoken = bytes(byte for entry in content if entry["token"] not in SPECIAL for byte in entry["bytes"])
    if before == kind.whole(prompt):  # the prompt ends with a whole character
        assert spoken.decode() == text


def check_stops(kind: Kind, ids: list[int], cut: int, draw: random.Random) -> None:
    """A stop string from every place in the answer on, and one that begins in the prompt."""
    prompt, answer = ids[:cut], ids[cut:]
    before = kind.ours.decode(prompt, final=False)
    text = kind.whole(ids)[len(before) :]
    for start in range(len(text)):
        stop = text[start : start + draw.randint(1, 4)]
        _, sample, deltas = run(kind, prompt, answer, parts(draw, len(answer)), stop=stop)
        assert (sample.text, sample.finish_reason) == (text[: text.find(stop)], "stop")
        assert "".join(delta.text for delta in deltas) == sample.text
        kept = [i for delta in deltas for i in delta.tokens[0]]
        assert kept == sample.token_ids == answer[: len(kept)]
        for tokens, stopped in ((kept, True), (kept[:-1], False)):
            read = kind.whole(prompt + tokens)
            if "\N{REPLACEMENT CHARACTER}" not in read:
                assert (stop in read[len(before) :]) == stopped
    across = before[-1:] + text[:1]
    if len(across) == 2 and across not in text:
        assert run(kind, prompt, answer, [len(answer)], stop=across)[1].text == text


def check(name: str, seed: int) -> None:
    draw, kind = random.Random(seed), kind_of(name)
    ids = kind.raw.encode(random_text(draw)).ids
    if len(ids) < 2:
        return
    check_cuts(kind, ids)
    cut = draw.randrange(1, len(ids))
    check_answer(kind, ids, cut, draw)
    if seed % len(KINDS) == list(KINDS).index(name):
        check_stops(kind, ids, cut, draw)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_what_it_adds_to_the_prompt(kind: str):
    for seed in range(30):
        check(kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_2000_answers_are_what_they_add_to_the_prompt(kind: str):
    for seed in range(2000):
        check(kind, seed)


def test_tokens_that_read_alike_are_told_apart():
    kind = kind_of("prefixed")
    letter, byte, *cut = map(kind.raw.get_vocab().__getitem__, ("a", "<0x61>", "<0xF0>", "<0xE2>"))
    told = completion_logprobs(
        kind.pieces,
        [letter, cut[0]],
        [-1.0, -2.0],
        [0, 1],
        [0, 1],
        [[(letter, -1.0), (byte, -0.5)], [(cut[0], -2.0), (cut[1], -0.25)]],
    )
    assert told["tokens"] == ["a", "bytes:\\xf0"]
    assert told["top_logprobs"] == [
        {"a": -1.0, f"token_id:{byte}": -0.5},
        {"bytes:\\xf0": -2.0, "bytes:\\xe2": -0.25},
    ]
    entries = chat_logprobs(kind.pieces, cut, [-2.0, -0.25], [0, 1], 0)["content"]
    assert [entry["bytes"] for entry in entries] == [[0xF0], [0xE2]]


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("ab</s>cd", {"a": 0, "##b": 1, "</s>": 2, "c": 6, "##d": 7}),
        ("</s>a  b", {"</s>": 0, "a": 4, "b": 6}),
        ("ab\ncd", {"a": 0, "##b": 1, "c": 2, "##d": 4}),
    ],
)
def test_tokens_have_places_in_a_prompt_that_decoding_does_not_give_back(text: str, places: dict[str, int]):
    """A word-piece vocabulary forgets what is between words, which here belongs to the later one."""
    ours = kind_of("word_pieces").ours
    ids = ours.encode(text, parse_special=True)
    assert [ours.token(i) for i in ids] == list(places)
    assert ours.offsets_in(text, ids) == list(places.values())
