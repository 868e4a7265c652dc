"""Training batches: length buckets, instances laid out as token rows, and workers that draw them ahead."""

import collections
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
from collections.abc import Callable, Generator
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt16

from jdllm.demo.tasks import GEN_LENGTH, Instance, stream
from jdllm.demo.tokenizer import CHAT_OVERHEAD, EOS, EOT, chat_ids, plain_ids


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One part of every training step: `batch` rows of `length` tokens.

    - `mixture`: (task, weight) pairs; weights need not sum to one.
    - `chat_share`: share of the examples whose prompt is wrapped in the chat template.
    """

    length: int
    batch: int
    mixture: tuple[tuple[str, float], ...]
    chat_share: float = 0.0


DEMO_BUCKETS: tuple[Bucket, ...] = (
    Bucket(48, 512, (("addition", 0.4), ("subtraction", 0.45), ("sorting", 0.15))),
    Bucket(
        64,
        256,
        (
            ("sorting", 0.1),
            ("reversal", 0.25),
            ("constrained copy", 0.3),
            ("brackets", 0.2),
            ("retrieval", 0.15),
        ),
    ),
    Bucket(
        128,
        160,
        (
            ("addition", 0.1),
            ("subtraction", 0.1),
            ("sorting", 0.05),
            ("reversal", 0.05),
            ("constrained copy", 0.05),
            ("brackets", 0.05),
            ("retrieval", 0.25),
            ("questions", 0.35),
        ),
        chat_share=0.5,
    ),
    Bucket(256, 40, (("retrieval", 1.0),), chat_share=0.2),
    Bucket(512, 24, (("retrieval", 1.0),), chat_share=0.2),
)
"""Retrieval is in four buckets, so that its contexts run from one pair to the longest."""


class Batches(NamedTuple):
    """Several training steps; rows and examples of all buckets lie one after another, bucket by bucket.

    - `tokens`: ids of every position, the response included.
    - `prompt_length`: tokens before the response.
    - `total_length`: tokens up to the end of the response; what follows is padding.
    """

    tokens: UInt16[np.ndarray, "steps rows"]
    prompt_length: UInt16[np.ndarray, "steps examples"]
    total_length: UInt16[np.ndarray, "steps examples"]


class Asked(NamedTuple):
    """The ids of a prompt, and its only right answer."""

    prompt: list[int]
    answer: str

    @classmethod
    def plainly(cls, instance: Instance) -> "Asked":
        """Without the chat template."""
        return cls(plain_ids(instance.prompt), instance.answer)


def layout_example(instance: Instance, chat: bool, gen_length: int) -> tuple[list[int], list[int]]:
    """(prompt ids, response ids): the answer, an end-of-turn id in a chat, end-of-sequence fill."""
    prompt = chat_ids(instance.prompt) if chat else plain_ids(instance.prompt)
    answer = plain_ids(instance.answer) + [EOT] * chat
    return prompt, answer + [EOS] * (gen_length - len(answer))


def draw_gen_length(rng: np.random.Generator, answer_length: int) -> int:
    """Half the responses have the full length, the others any multiple of 8 that holds the answer."""
    if rng.random() < 0.5:
        return GEN_LENGTH
    return 8 * int(rng.integers(-(-answer_length // 8), GEN_LENGTH // 8 + 1))


def make_batches(buckets: tuple[Bucket, ...], steps: int, seed: int, index: int) -> Batches:
    """Draw the training examples of `steps` steps; (seed, index) determines them."""
    rng = np.random.default_rng([seed, index])
    parts = [_bucket_batches(bucket, steps, rng) for bucket in buckets]
    return Batches(*(np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True)))


def _bucket_batches(bucket: Bucket, steps: int, rng: np.random.Generator) -> Batches:
    count = steps * bucket.batch
    names, weights = zip(*bucket.mixture, strict=True)
    tasks = rng.choice(len(names), size=count, p=np.array(weights) / sum(weights)).tolist()
    chats = (rng.random(count) < bucket.chat_share).tolist()
    room = bucket.length - GEN_LENGTH
    streams = {
        (i, chat): stream(name, "train", rng, room - CHAT_OVERHEAD * chat)
        for i, name in enumerate(names)
        for chat in (False, True)
        if not chat or bucket.chat_share
    }
    tokens = np.full((count, bucket.length), EOS, np.uint16)
    lengths = np.empty((2, count), np.uint16)
    for row, key in enumerate(zip(tasks, chats, strict=True)):
        instance = next(streams[key])
        gen_length = draw_gen_length(rng, len(instance.answer) + 1)
        prompt, response = layout_example(instance, key[1], gen_length)
        lengths[:, row] = len(prompt), len(prompt) + gen_length
        tokens[row, : len(prompt) + gen_length] = prompt + response
    return Batches(tokens.reshape(steps, -1), *lengths.reshape(2, steps, bucket.batch))


def prefetch[BatchesT](make: Callable[[int], BatchesT], workers: int) -> Generator[BatchesT]:
    """Endless batches, drawn ahead by worker processes; their order does not depend on the workers.

    Arguments:
    - `make`: the batches of an index, which counts up from 0; processes receive it.
    - `workers`: processes, each up to two results ahead.

    Close the iterator to end the processes.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        waiting: collections.deque[concurrent.futures.Future[BatchesT]] = collections.deque()
        try:
            for index in itertools.count():
                waiting.append(pool.submit(make, index))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
