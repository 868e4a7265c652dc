"""Quality and work of a block model on the tasks of the bundled models, by how its blocks are filled.

Run as `python3 -m benchmarks block_quality [--model DIR] [--block-lengths 4 8 16] [--thresholds 0.5 0.9]
[--editing 0.5] [--instances 2000]`. All cells answer the same held-out instances, the first of `jdllm eval`.
Cells of one block length are the schedule (one token a step), the sequential and the dynamic rule, and the
dynamic rule with editing. Each is compared with the schedule at the model's own block length. Cells of
self-speculation draft blocks of these lengths, and are compared with block length 1, whose tokens they
should give. Prints Markdown tables, and writes the JSON file anew after every cell.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cases import case_parser
from benchmarks.quality.block_tables import tables
from benchmarks.quality.cells import SEED, draw_instances
from benchmarks.quality.tables import paired
from benchmarks.record import write
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo import checkpoint_path
from jdllm.demo.tasks import GEN_LENGTH, Instance
from jdllm.demo.tokenizer import answer_text, plain_ids
from jdllm.errors import JdllmError
from jdllm.llm import LLM
from jdllm.serving.modes.registry import mode_of

NAME = "block_quality_demo"
BLOCK_LENGTHS = (4, 8, 16)
THRESHOLDS = (0.5, 0.7, 0.9)
EDITING = (0.5, 0.9)
EDITED = 0.7
"""The threshold of the dynamic rule with editing."""

SPECULATION = "self_speculation"

Row = dict[str, Any]


class Cell(NamedTuple):
    """One setting.

    - `rule`: a transfer rule, or `SPECULATION`.
    - `block_length`: of blocks, or of drafts.
    - `threshold`: of the dynamic rule; of self-speculation, whose drafts are filled by the rule "threshold",
      or at once where it is `None`.
    - `editing`: an `editing_threshold`.
    """

    rule: str
    block_length: int
    threshold: float | None = None
    editing: float | None = None

    def sampling(self) -> SamplingParams:
        options: dict[str, Any] = {"threshold": self.threshold, "editing_threshold": self.editing}
        if self.rule != SPECULATION:
            options["transfer"] = self.rule
        else:
            # With the dynamic rule the quota of a draft, which is all of it, would come before the threshold.
            options["generation_mode"] = SPECULATION
            options["transfer"] = None if self.threshold is None else "threshold"
        given = {name: value for name, value in options.items() if value is not None}
        return SamplingParams(gen_length=GEN_LENGTH, block_length=self.block_length, **given)

    def against(self, block_length: int) -> "Cell":
        """The cell that this one is compared with, of a model with that block length."""
        return Cell("schedule", 1 if self.rule == SPECULATION else block_length)


class Answers(NamedTuple):
    """What a cell did with all instances.

    - `right`: whether each answer equals the right one.
    - `tokens`: of all answers, end ids included; `forwards`: evaluations of these, each counted for itself.
    - `seconds`: wall time, compiling included.
    """

    right: list[bool]
    tokens: int
    forwards: int
    seconds: float


def grid(
    block_length: int, block_lengths: Sequence[int], thresholds: Sequence[float], editing: Sequence[float]
) -> list[Cell]:
    """The cells of these settings, each once; those that others are compared with come first.

    Arguments:
    - `block_length`: of the model.
    - `block_lengths`, `thresholds`, `editing`: what is tried.
    """

    def cells() -> Iterator[Cell]:
        yield Cell("schedule", block_length)
        yield Cell("schedule", 1)
        for length in block_lengths:
            yield Cell("schedule", length)
            yield Cell("sequential", length)
            yield from (Cell("dynamic", length, threshold) for threshold in thresholds)
            yield from (Cell("dynamic", length, EDITED, one) for one in editing)
        for length in block_lengths:
            yield Cell(SPECULATION, length)
            yield from (Cell(SPECULATION, length, threshold) for threshold in thresholds)

    return list(dict.fromkeys(cells()))


def measure(llm: LLM, instances: Sequence[Instance], sampling: SamplingParams) -> Answers:
    """Answer all instances; the engine packs as many at a time as its row budget takes."""
    start = time.perf_counter()
    prompts = [plain_ids(instance.prompt) for instance in instances]
    outputs = llm.generate(prompt_token_ids=prompts, sampling=sampling)
    seconds = time.perf_counter() - start
    right = [
        answer_text(output.token_ids) == instance.answer
        for output, instance in zip(outputs, instances, strict=True)
    ]
    tokens, forwards = sum(len(o.token_ids) for o in outputs), sum(o.nfe for o in outputs)
    return Answers(right, tokens, forwards, seconds)


def row(cell: Cell, instances: Sequence[Instance], answers: Answers) -> Row:
    """What is recorded of a cell: its fields and

    - `instances`, `exact_match`, `tasks`: how many there were, the share of right answers, and that by task;
    - `tokens_per_forward`: tokens of the answers, end ids included, by forward evaluations;
    - `right`: 1 or 0 for each instance, in order;
    - `seconds`: wall time, compiling included.
    """
    tasks: dict[str, list[bool]] = {}
    for instance, right in zip(instances, answers.right, strict=True):
        tasks.setdefault(instance.task, []).append(right)
    return {
        **cell._asdict(),
        "instances": len(instances),
        "exact_match": float(np.mean(answers.right)),
        "tasks": {task: float(np.mean(rights)) for task, rights in tasks.items()},
        "tokens_per_forward": answers.tokens / answers.forwards,
        "right": "".join("01"[right] for right in answers.right),
        "seconds": answers.seconds,
    }


def comparisons(rows: Sequence[Row], block_length: int) -> list[Row]:
    """Every cell against the one that it is compared with.

    Arguments:
    - `rows`: as `row` gives them, all over the same instances.
    - `block_length`: of the model.

    Returns for each: the setting; `against`, the other cell's rule and block length; `own_only` and
    `other_only`, the instances that only one of the two got right; `difference` of the shares of right
    answers, positive where this cell has more; `low` and `high`, its Tango interval; and the `verdict`.
    """
    cells = {_cell(one): one for one in rows}
    result = []
    for one in rows:
        cell = _cell(one)
        other = cell.against(block_length)
        if cell != other and other in cells:
            against = f"{other.rule}, {other.block_length}"
            pair = paired(one, cells[other], "own_only", "other_only")
            result.append({**cell._asdict(), "against": against, **pair})
    return result


def _cell(one: Row) -> Cell:
    return Cell(*(one[name] for name in Cell._fields))


def make_parser() -> argparse.ArgumentParser:
    parser = case_parser("block_quality", __doc__)
    parser.add_argument(
        "--model", type=Path, default=checkpoint_path("block"), help="a checkpoint of `jdllm.demo.train`"
    )
    parser.add_argument("--block-lengths", nargs="+", type=int, default=BLOCK_LENGTHS)
    parser.add_argument("--thresholds", nargs="*", type=float, default=THRESHOLDS, help="dynamic rule")
    parser.add_argument("--editing", nargs="*", type=float, default=EDITING, help="editing thresholds")
    parser.add_argument("--instances", type=int, default=2000, help="of each cell, over all tasks")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    return parser


def load_model(args: argparse.Namespace) -> LLM:
    return LLM(args.model, dtype=args.dtype, max_num_batched_tokens=args.max_num_batched_tokens)


def run(args: argparse.Namespace) -> None:
    instances = draw_instances(args.instances)
    llm = load_model(args)
    own = llm.config.block_length
    if own is None:
        raise JdllmError(f"{args.model} is no block model: train one with jdllm.demo.train --model block")
    cells = [(cell, cell.sampling()) for cell in grid(own, args.block_lengths, args.thresholds, args.editing)]
    for _, sampling in cells:
        mode_of(llm.config).spec(plain_ids(instances[0].prompt), sampling, llm.config)
    settings = {
        "model": args.model.name,
        "block_length": own,
        "dtype": args.dtype,
        "instances": len(instances),
        "seed": SEED,
        "gen_length": GEN_LENGTH,
    }
    rows: list[Row] = []
    for cell, sampling in cells:
        answers = measure(llm, instances, sampling)
        rows.append(row(cell, instances, answers))
        said = f"{rows[-1]['exact_match']:.1%} {answers.seconds:.0f} s"
        print(*cell, said, file=sys.stderr, flush=True)
        compared = comparisons(rows, own)
        write(NAME, rows, args.out, settings=settings, comparisons=compared)
    print(tables(rows, comparisons(rows, own)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(arguments)
    try:
        run(args)
    except JdllmError as error:
        parser.error(str(error))
