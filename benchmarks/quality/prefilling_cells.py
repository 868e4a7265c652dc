"""What each setting of a long context is worth: answers of the retrieval model, by single settings.

Run as `python3 -m benchmarks prefilling_quality [--instances 30] [--length 8192] [--out DIR]`, by default
with the bundled retrieval model. Each instance is a text that training never saw, and is asked about facts at
ten places. All settings answer the same questions. Each changes the first one, which keeps four chunks of 256
tokens by the scores of the query, in one part, and is compared with it: the mean difference of a text, with
Student's interval over the texts. Chunks of other lengths keep as many tokens in all. The record is written
anew after every setting, and `--append` adds the rows of another run, which changed other `--parts`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from benchmarks.cases import case_parser, exit_code
from benchmarks.quality.lost_in_the_middle import Found, Question, answering, ask, draw_questions, read_part
from benchmarks.quality.prefilling_tables import table
from benchmarks.record import write
from jdllm.decoding.prefilling import Prefilling
from jdllm.demo import checkpoint_path
from jdllm.demo.long_tasks import INSTRUCTION, LONG_TASKS, Fact
from jdllm.demo.tokenizer import answer_text
from jdllm.errors import RequestError
from jdllm.llm import LLM
from jdllm.pallas.device import Kernels
from jdllm.prefilling.prefilled import Prefilled

NAME = "prefilling_quality"
PLACES = 10
"""Questions about each text."""

BASE = Prefilling(chunk_length=256, chunks_kept=4, score="query")

_PAPER: dict[str, Any] = {"retention_direction": "both", "retention_mask": "none"}
_DRAFT: dict[str, Any] = {"score": "draft", "draft_length": 4, "draft_rounds": 1}


class Setting(NamedTuple):
    """One way to prepare a context.

    - `part`, `value`: what it changes of `BASE`, in words; `changes`: the same in fields.
    """

    part: str
    value: str
    changes: dict[str, Any]

    @property
    def prefilling(self) -> Prefilling:
        return BASE.changed(**self.changes)


SETTINGS = (
    Setting("none", "256 x 4", {}),
    Setting("chunks", "64 x 16", {"chunk_length": 64, "chunks_kept": 16}),
    Setting("chunks", "128 x 8", {"chunk_length": 128, "chunks_kept": 8}),
    Setting("chunks", "512 x 2", {"chunk_length": 512, "chunks_kept": 2}),
    *(Setting("kept chunks", f"{kept}", {"chunks_kept": kept}) for kept in (1, 2, 8)),
    *(Setting("kept tokens", f"{kept}", _PAPER | {"tokens_kept": kept}) for kept in (192, 128, 64)),
    Setting("kept tokens", "128, by heads", _PAPER | {"tokens_kept": 128, "retention": "per_head"}),
    Setting("kept tokens", "128, causal", {"tokens_kept": 128}),
    Setting("score", "draft of 4, 1 round", _DRAFT),
    Setting("score", "draft of 16, filled", _DRAFT | {"draft_length": 16, "draft_rounds": None}),
    *(Setting("build", build, {"build": build}) for build in ("full_query", "chunk_query", "chunk_only")),
    Setting("first token", "chunk_bos=False", {"chunk_bos": False}),
)
"""The first is what all others are compared with."""


def holds(found: Prefilled, fact: Fact, prefilling: Prefilling) -> bool:
    """Whether all tokens of a fact, which no border of a chunk cuts, are among those that the answer read.

    Where each head keeps its own tokens, those that some head keeps count.
    """
    for (start, stop), kept in zip(found.spans, found.kept, strict=True):
        if start <= fact.start and fact.stop <= stop:
            behind = prefilling.chunk_bos - start
            return set(range(fact.start + behind, fact.stop + behind)) <= set(np.unique(kept).tolist())
    return False


def measure(llm: LLM, questions: Sequence[Question], setting: Setting, instruction: str) -> Found:
    """Answer all questions, as many at a time as the engine packs."""
    prefilling = setting.prefilling
    sampling = answering(prefilling)
    start = time.perf_counter()
    outputs, _ = ask(llm, questions, instruction, setting.value, sampling)
    seconds = time.perf_counter() - start
    asked = [(o, q.fact) for o, q in zip(outputs, questions, strict=True)]
    right = [answer_text(output.token_ids) == fact.answer for output, fact in asked]
    seen = [bool(o.prefilling and holds(o.prefilling, fact, prefilling)) for o, fact in asked]
    return Found(np.reshape(right, (-1, PLACES)), np.reshape(seen, (-1, PLACES)), seconds)


def row(task: str, setting: Setting, length: int, found: Found) -> dict[str, Any]:
    """What is recorded of a setting.

    - `exact_match`, `recall`: shares of all questions that were answered right, and whose fact was whole in
      the tokens that the answer read.
    - `right`: of each text a digit for each question, in order.
    - `seconds`: of all questions, compiling included.
    """
    return {
        "task": task,
        "part": setting.part,
        "value": setting.value,
        "length": length,
        "instances": len(found.right),
        "questions": found.right.size,
        "exact_match": float(found.right.mean()),
        "recall": float(found.seen.mean()),
        "right": ["".join("01"[int(one)] for one in text) for text in found.right],
        "seconds": found.seconds,
    }


def in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last row of each task and setting, by task, and then as `SETTINGS` has them."""
    places = {(setting.part, setting.value): place for place, setting in enumerate(SETTINGS)}
    last = {(row["task"], places[row["part"], row["value"]]): row for row in rows}
    return [last[key] for key in sorted(last)]


def make_parser() -> argparse.ArgumentParser:
    parser = case_parser(NAME, __doc__)
    parser.add_argument(
        "--model", type=Path, default=checkpoint_path("retrieval"), help="a checkpoint (a bundled one)"
    )
    parser.add_argument("--tasks", nargs="+", choices=LONG_TASKS, default=list(LONG_TASKS))
    parser.add_argument("--length", type=int, default=8192, help="tokens of a context")
    parser.add_argument("--instances", type=int, default=30, help=f"texts, of {PLACES} questions each")
    parser.add_argument(
        "--parts", nargs="+", choices=sorted({s.part for s in SETTINGS[1:]}), help="what to change (all)"
    )
    parser.add_argument("--append", type=Path, help="the record of another part")
    parser.add_argument("--instruction", default=INSTRUCTION)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--kernels", choices=get_args(Kernels), default="auto")
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    return parser


def run(args: argparse.Namespace) -> None:
    if args.instances < 1:
        raise RequestError(f"instances is {args.instances}, expected a positive integer")
    parts = args.parts or [setting.part for setting in SETTINGS]
    chosen = [setting for setting in SETTINGS if setting.part in ("none", *parts)]
    settings = {"model": args.model.name}
    settings |= {name: getattr(args, name) for name in ("instruction", "dtype", "length", "instances")}
    rows = [] if args.append is None else read_part(args.append, settings, NAME)
    lengths = {setting.prefilling.chunk_length for setting in SETTINGS}
    asked = {
        task: draw_questions(task, args.length, args.instances, PLACES, sorted(lengths), 4)
        for task in args.tasks
    }
    llm = LLM(
        args.model,
        dtype=args.dtype,
        kernels=args.kernels,
        max_num_batched_tokens=args.max_num_batched_tokens,
        progress=False,
    )
    for setting in chosen:
        for task, questions in asked.items():
            found = measure(llm, questions, setting, args.instruction)
            new = row(task, setting, args.length, found)
            said = f"{task}, {setting.part} {setting.value}: {new['exact_match']:.1%} {found.seconds:.0f} s"
            print(said, file=sys.stderr, flush=True)
            rows = in_order([*rows, new])
            write(NAME, rows, args.out, settings=settings)
    print(table(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(run, make_parser().parse_args(arguments))
