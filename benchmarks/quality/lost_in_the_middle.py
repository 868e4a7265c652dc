"""Facts in the middle of long contexts: what Prefilling-dLLM finds, by length and position.

Run as `python3 -m benchmarks lost_in_the_middle [--model DIR] [--lengths 2048 131072] [--settings 256x16]
[--instances 30] [--positions 10] [--append FILE] [--out DIR]`, by default with the bundled retrieval
model. A setting is tokens of a chunk x chunks kept. Each instance is a text that training never saw, and is
asked once for each position, about the nearest fact that no border of a chunk cuts. Beside the settings stand
the plain run over the whole context, where that is short enough, and one over its first and last 256 tokens.
The record is written anew after every row, so that a run that is cut short keeps what it has, and `--append`
adds the rows of another one. In the end a picture is drawn, beside the record where `--out` is given, else in
`docs`. Needs matplotlib (the `plot` extra).
"""

import argparse
import dataclasses
import functools
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Int

from benchmarks.cases import case_parser, exit_code
from benchmarks.quality.lost_tables import draw, require_matplotlib, table
from benchmarks.record import write
from benchmarks.tables import DOCUMENT
from jdllm.decoding.prefilling import Prefilling
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo import checkpoint_path
from jdllm.demo.long_tasks import INSTRUCTION, LONG_TASKS, Fact, Haystack, draw_pairs, is_whole, long_stream
from jdllm.demo.tasks import GEN_LENGTH
from jdllm.demo.tokenizer import answer_text, plain_ids
from jdllm.errors import ConfigError, RequestError
from jdllm.llm import LLM
from jdllm.outputs import RequestOutput
from jdllm.pallas.device import Kernels
from jdllm.prompts import LongPrompt

NAME = "lost_in_the_middle"
LENGTHS = tuple(2**i for i in range(11, 18))
SETTINGS = ("256x16", "256x8", "256x4")
PLAIN, TRUNCATED = "plain", "head and tail"

_SEED = 5
_END = 256
"""Tokens of either end that truncation leaves."""


class Question(NamedTuple):
    """A text, and the fact in it that is asked about."""

    haystack: Haystack
    fact: Fact


@dataclasses.dataclass(frozen=True)
class Found:
    """What a method did with the questions.

    - `right`: whether each answer equals the right one.
    - `seen`: whether the wanted fact was whole in what the answer was denoised from.
    - `seconds`: wall time, compiling included.
    """

    right: Bool[np.ndarray, "instances positions"]
    seen: Bool[np.ndarray, "instances positions"]
    seconds: float


def draw_questions(
    task: str, length: int, instances: int, positions: int, chunk_lengths: Sequence[int], key_letters: int
) -> list[Question]:
    """Questions about texts that training never saw, text by text and in each from its begin to its end.

    Arguments:
    - `task`: a key of `LONG_TASKS`; pairs have keys of `key_letters`.
    - `length`: characters, each of which is a token.
    - `positions`: how many are asked about each text, evenly spaced.
    - `chunk_lengths`: the facts are whole in chunks of each of these.

    Raises `RequestError` where a text has no such fact.
    """
    rng = np.random.default_rng([_SEED, length, list(LONG_TASKS).index(task)])
    make = functools.partial(draw_pairs, key_letters=key_letters) if task == "pairs" else LONG_TASKS[task]
    questions = []
    for haystack in itertools.islice(long_stream(make, "test", rng, length), instances):
        whole = [fact for fact in haystack.facts if all(is_whole(fact, size) for size in chunk_lengths)]
        if not whole:
            raise RequestError(f"a text of {length} characters has no whole fact: use longer ones, or chunks")
        middles = np.array([(fact.start + fact.stop) / 2 for fact in whole])
        places = np.linspace(0, length, positions)
        nearest = np.abs(middles - places[:, None]).argmin(axis=1).tolist()
        questions += [Question(haystack, whole[i]) for i in nearest]
    return questions


def long_prompts(questions: Sequence[Question], instruction: str) -> list[LongPrompt]:
    """The questions with their contexts as ids, which questions about one text share."""
    ids = functools.cache(_ids)
    return [
        LongPrompt(instruction=ids(instruction), context=ids(text), query=_ids(fact.query))
        for (text, _, _), fact in questions
    ]


def _ids(text: str) -> Int[np.ndarray, " tokens"]:
    return np.array(plain_ids(text), np.int32)


def ask(
    llm: LLM, questions: Sequence[Question], instruction: str, method: str, sampling: SamplingParams
) -> tuple[list[RequestOutput], list[bool]]:
    """The answers, and whether the wanted fact was whole in what they were denoised from."""
    prompts = long_prompts(questions, instruction)
    if method not in (PLAIN, TRUNCATED):
        outputs = llm.generate(prompts, sampling=sampling)
        spans = [output.prefilling.spans if output.prefilling else [] for output in outputs]
    else:
        contexts = [np.asarray(prompt.context) for prompt in prompts]
        spans = [[(0, len(context) + 1)] for context in contexts]
        if method == TRUNCATED:
            spans = [[(0, _END + 1), (len(context) - _END, len(context) + 1)] for context in contexts]
            contexts = [np.concatenate([context[:_END], context[-_END:]]) for context in contexts]
        plain = [
            np.concatenate([prompt.instruction, context, prompt.query]).tolist()
            for prompt, context in zip(prompts, contexts, strict=True)
        ]
        outputs = llm.generate(prompt_token_ids=plain, sampling=sampling)
    facts = [question.fact for question in questions]
    return outputs, [
        any(start <= fact.start and fact.stop < stop for start, stop in kept)
        for fact, kept in zip(facts, spans, strict=True)
    ]


def measure(
    llm: LLM, questions: Sequence[Question], positions: int, method: str, instruction: str, score_mask: str
) -> Found:
    """Answer all questions, as many at a time as the engine packs."""
    prefilling = None
    if method not in (PLAIN, TRUNCATED):
        chunk_length, kept = sizes_of(method)
        prefilling = Prefilling(
            chunk_length=chunk_length,
            chunks_kept=kept,
            score="query",
            score_mask=score_mask,  # pyright: ignore[reportArgumentType]
        )
    sampling = answering(prefilling)
    start = time.perf_counter()
    outputs, seen = ask(llm, questions, instruction, method, sampling)
    seconds = time.perf_counter() - start
    right = [answer_text(o.token_ids) == q.fact.answer for o, q in zip(outputs, questions, strict=True)]
    return Found(np.reshape(right, (-1, positions)), np.reshape(seen, (-1, positions)), seconds)


def answering(prefilling: Prefilling | None) -> SamplingParams:
    """How questions are answered, whatever prepares their contexts."""
    return SamplingParams(
        gen_length=GEN_LENGTH,
        block_length=GEN_LENGTH,
        transfer="threshold",
        threshold=0.9,
        prefilling=prefilling,
    )


def row(task: str, method: str, length: int, found: Found) -> dict[str, Any]:
    """What is recorded of a method at one length.

    - `exact_match`, `recall`: shares of all questions that were answered right, and whose fact was whole in
      what was kept; `exact_by_position`, `recall_by_position`: the same by position.
    - `seconds`: of all questions, compiling included.
    """
    return {
        "task": task,
        "method": method,
        "length": length,
        "instances": len(found.right),
        "exact_match": float(found.right.mean()),
        "recall": float(found.seen.mean()),
        "exact_by_position": found.right.mean(axis=0).tolist(),
        "recall_by_position": found.seen.mean(axis=0).tolist(),
        "seconds": found.seconds,
    }


def read_part(path: Path, settings: dict[str, Any], name: str = NAME) -> list[dict[str, Any]]:
    """The rows of another run; raises `ConfigError` where there is no file, or one of other settings.

    Arguments:
    - `name`: of the case.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is no file: --append takes what another run wrote, {name}.json")
    content = json.loads(path.read_text())
    if content["settings"] != settings:
        raise ConfigError(f"{path} has the settings {content['settings']}, this run has {settings}")
    return content["rows"]


def in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last row of each task, method and length; by length."""
    last = {(row["task"], row["method"], row["length"]): row for row in rows}
    return sorted(last.values(), key=lambda row: row["length"])


def methods_at(length: int, settings: Sequence[str], plain_up_to: int) -> Iterator[str]:
    """What is run at a length."""
    yield from settings
    if length <= plain_up_to:
        yield PLAIN
    if length > 2 * _END:
        yield TRUNCATED


def sizes_of(setting: str) -> tuple[int, int]:
    """Chunk length and chunks kept; raises `RequestError` for what is not two numbers with an x between."""
    if not re.fullmatch(r"\d+x\d+", setting):
        raise RequestError(f"setting {setting!r}: expected tokens of a chunk x chunks kept, as 256x16")
    chunk_length, kept = map(int, setting.split("x"))
    Prefilling(chunk_length=chunk_length, chunks_kept=kept)
    return chunk_length, kept


def make_parser() -> argparse.ArgumentParser:
    parser = case_parser(NAME, __doc__)
    parser.add_argument(
        "--model", type=Path, default=checkpoint_path("retrieval"), help="a checkpoint (a bundled one)"
    )
    parser.add_argument("--tasks", nargs="+", choices=LONG_TASKS, default=list(LONG_TASKS))
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    parser.add_argument("--positions", type=int, default=10)
    parser.add_argument("--instances", type=int, default=30, help="texts of each length")
    parser.add_argument("--instruction", default=INSTRUCTION, help="the demo model knows none")
    parser.add_argument("--plain-up-to", type=int, default=4096, help="longest context of the plain run")
    parser.add_argument("--key-letters", type=int, default=4, help="of the keys; the demo model knows 2")
    parser.add_argument("--score-mask", choices=("causal", "full"), default="causal")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--kernels", choices=get_args(Kernels), default="auto")
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--append", type=Path, help="the record of another part")
    return parser


def checked(args: argparse.Namespace) -> list[int]:
    """The chunk lengths that were asked for; raises `RequestError` for numbers that cannot be."""
    for name in ("positions", "instances", "key_letters"):
        if getattr(args, name) < 1:
            raise RequestError(f"{name} is {getattr(args, name)}, expected a positive integer")
    if min(args.lengths) < 1:
        raise RequestError(f"a length is {min(args.lengths)}, expected positive integers")
    return [sizes_of(setting)[0] for setting in args.settings]


def run(args: argparse.Namespace) -> None:
    chunk_lengths = checked(args)
    require_matplotlib()
    names = ("instruction", "key_letters", "score_mask", "dtype")
    settings = {name: getattr(args, name) for name in names}
    rows = [] if args.append is None else read_part(args.append, settings)
    llm = LLM(
        args.model,
        dtype=args.dtype,
        kernels=args.kernels,
        max_num_batched_tokens=args.max_num_batched_tokens,
        progress=False,
    )
    for task, length in itertools.product(args.tasks, args.lengths):
        questions = draw_questions(
            task, length, args.instances, args.positions, chunk_lengths, args.key_letters
        )
        for method in methods_at(length, args.settings, args.plain_up_to):
            found = measure(llm, questions, args.positions, method, args.instruction, args.score_mask)
            new = row(task, method, length, found)
            said = f"{task} {method} {length}: {new['exact_match']:.1%} {found.seconds:.0f} s"
            print(said, file=sys.stderr, flush=True)
            rows = in_order([*rows, new])
            write(NAME, rows, args.out, settings=settings)
    draw(rows, (args.out or DOCUMENT.parent) / f"{NAME}.png")
    print(table(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(run, make_parser().parse_args(arguments))
