"""Quality and work of the cached modes on the bundled demo model, against the exact mode.

Run as `python3 -m benchmarks quality [--rules schedule] [--policies sparse head_sparse] [--delays 0 1]
[--retentions 0.1 0.5] [--windows 0 8] [--instances 2000] [--append FILE ...]`. A cell is a transfer rule with
a cache policy, for sparse and head_sparse with a retention and a refresh delay as well; all cells answer the
same held-out instances, the first of `jdllm eval`. The exact mode is evaluated for every rule, because the
others are compared with it. Every cell is evaluated again with each suffix window. Prints Markdown tables.
The JSON file is written anew after every cell, so that a run that is cut short keeps what it has; `--append`
adds the cells of other parts.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cases import case_parser
from benchmarks.quality.tables import changes, comparisons, tables
from benchmarks.record import environment, write
from jdllm.decoding.cache_policies import Phase, policy_of
from jdllm.decoding.registry import POLICIES
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.schedule import block_steps
from jdllm.demo import checkpoint_path
from jdllm.demo.compare import same_tokens
from jdllm.demo.tasks import GEN_LENGTH, TASKS, Instance, test_instances
from jdllm.demo.tokenizer import answer_text, plain_ids
from jdllm.errors import ConfigError, JdllmError, RequestError
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.serving.request import Request
from jdllm.serving.spec import generation_spec

NAME = "quality_demo"
SEED = 1

EXACT = "none"
ALL_POLICIES = (EXACT, *POLICIES)
RULES: dict[str, dict[str, Any]] = {
    "schedule": {},
    "threshold": {"transfer": "threshold", "threshold": 0.9},
    "falling_0.3": {"transfer": "falling_threshold", "threshold": 0.9, "threshold_fall": 0.3},
    "falling_0.6": {"transfer": "falling_threshold", "threshold": 0.9, "threshold_fall": 0.6},
    "factor": {"transfer": "factor", "factor": 1.0},
}
RETENTIONS = (0.1, 0.2, 0.3, 0.4, 0.5)
DELAYS = (0, 1)


class Cell(NamedTuple):
    """One setting.

    - `rule`: a key of `RULES`.
    - `policy`: a cache of `SamplingParams`.
    - `retention`: of the policies that select rows, else `None`.
    - `delay`: step of a block that refreshes; `None` without a cache, and of a policy that refreshes once.
    - `window`: masks behind the block that are evaluated; `None` for all.
    """

    rule: str
    policy: str
    retention: float | None = None
    delay: int | None = None
    window: int | None = None

    def sampling(self, block_length: int) -> SamplingParams:
        """Every block is run, one step a token where the rule is the schedule."""
        options = {
            "retention": self.retention,
            "refresh_delay": self.delay,
            "suffix_window": self.window,
        }
        given = {name: value for name, value in options.items() if value is not None}
        return SamplingParams(
            gen_length=GEN_LENGTH,
            block_length=block_length,
            early_stop=False,
            return_history=True,
            cache=self.policy,  # pyright: ignore[reportArgumentType]
            **RULES[self.rule],
            **given,
        )


class Answers(NamedTuple):
    """What a cell did with all instances.

    - `tokens`: int32 `[instances, gen_length]`.
    - `right`: whether each answer equals the right one.
    - `forwards`: forward evaluations over all instances, each counted for itself.
    - `rows`: rows of them, without padding: a whole sequence, or what a reuse step forwards.
    - `seconds`: wall time, compiling included.
    """

    tokens: np.ndarray
    right: list[bool]
    forwards: int
    rows: int
    seconds: float


def grid(
    rules: Sequence[str],
    policies: Sequence[str],
    retentions: Sequence[float],
    delays: Sequence[int],
    windows: Sequence[int] = (),
) -> Iterator[Cell]:
    """The cells of these settings, of each rule the exact one first, and of each cell the one without a
    window."""
    for cell in _with_all_rows(rules, policies, retentions, delays):
        yield cell
        yield from (cell._replace(window=window) for window in windows)


def _with_all_rows(
    rules: Sequence[str], policies: Sequence[str], retentions: Sequence[float], delays: Sequence[int]
) -> Iterator[Cell]:
    for rule in rules:
        yield Cell(rule, EXACT)
        for policy in policies:
            if policy == EXACT:
                continue
            if POLICIES[policy].scored:
                yield from (Cell(rule, policy, *both) for both in itertools.product(retentions, delays))
            else:
                yield Cell(rule, policy, None, None if POLICIES[policy].once else POLICIES[policy].delay)


def draw_instances(count: int) -> list[Instance]:
    """At least `count` test instances, as many of each task, which training never saw.

    Raises `RequestError` for a count that is not positive.
    """
    if count < 1:
        raise RequestError(f"instances is {count}, expected a positive integer")
    each = -(-count // len(TASKS))
    return [instance for task in TASKS for instance in test_instances(task, each, SEED)]


def measure(llm: LLM, instances: Sequence[Instance], sampling: SamplingParams) -> Answers:
    """Answer all instances; the engine packs as many at a time as its row budget takes.

    Arguments:
    - `llm`: the model.
    - `instances`: what is asked.
    - `sampling`: with `return_history`, and without early stop.
    """
    prompts = [plain_ids(instance.prompt) for instance in instances]
    start = time.perf_counter()
    outputs = llm.generate(prompt_token_ids=prompts, sampling=sampling)
    seconds = time.perf_counter() - start
    rows = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.history is not None
        rows += rows_forwarded(prompt, output.history, sampling, llm.config)
    right = [
        answer_text(o.token_ids) == instance.answer for o, instance in zip(outputs, instances, strict=True)
    ]
    tokens = np.array([o.token_ids for o in outputs], np.int32)
    return Answers(tokens, right, sum(o.nfe for o in outputs), rows, seconds)


def rows_forwarded(
    prompt: Sequence[int], history: np.ndarray, sampling: SamplingParams, config: ModelConfig
) -> int:
    """Rows that one request's forward evaluations had in all, by going through its steps once more.

    Arguments:
    - `prompt`: ids.
    - `history`: int32 `[steps, length]`, the sequence after every step.
    - `sampling`, `config`: of the run.
    """
    request, policy, rows = Request(generation_spec(prompt, sampling, config)), policy_of(sampling), 0
    for after in history:
        if request.phase is Phase.REFRESH and policy is not None:
            request.store(np.setdiff1d(request.evaluated, policy.candidates(request.view())), 0)
        rows += len(request.forwarded if request.phase is Phase.REUSE else request.evaluated)
        changed = np.flatnonzero(after != request.tokens)
        request.advance(changed, after[changed], np.zeros(len(changed)))
    return rows


def row(cell: Cell, instances: Sequence[Instance], answers: Answers, exact: Answers) -> dict[str, Any]:
    """What is recorded of a cell.

    Arguments:
    - `cell`, `instances`, `answers`: what was evaluated.
    - `exact`: the exact mode's answers under the same rule.

    Returns the cell's fields and
    - `instances`, `exact_match`, `tasks`: how many there were, the share of right answers, and that by task;
    - `tokens_per_forward`, `tokens_per_row`: response positions filled, by forward evaluations and by rows;
    - `same_answers`, `same_tokens`: shares that equal the exact mode's; tokens count up to the later of the
      two ends of the text, end ids included, so that the fill behind it cannot hide differences;
    - `right`: 1 or 0 for each instance, in order;
    - `seconds`: wall time, compiling included.
    """
    tasks: dict[str, list[bool]] = {}
    for instance, right in zip(instances, answers.right, strict=True):
        tasks.setdefault(instance.task, []).append(right)
    texts, exact_texts = ([answer_text(ids) for ids in side.tokens.tolist()] for side in (answers, exact))
    same = [a == b for a, b in zip(texts, exact_texts, strict=True)]
    return {
        **cell._asdict(),
        "instances": len(instances),
        "exact_match": float(np.mean(answers.right)),
        "tasks": {task: float(np.mean(rights)) for task, rights in tasks.items()},
        "tokens_per_forward": answers.tokens.size / answers.forwards,
        "tokens_per_row": answers.tokens.size / answers.rows,
        "same_answers": float(np.mean(same)),
        "same_tokens": same_tokens(answers.tokens, exact.tokens),
        "right": "".join("01"[right] for right in answers.right),
        "seconds": answers.seconds,
    }


def read_part(path: Path, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The cells of another run's file, and the commands that they come from.

    Raises `ConfigError` where there is no file, or one of other settings.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is no file: --append takes what other runs wrote, {NAME}.json")
    content = json.loads(path.read_text())
    if content["settings"] != settings:
        raise ConfigError(
            f"{path} has the settings {content['settings']}, this run has {settings}: cells of both are no"
            " table, so use the same ones or leave it away"
        )
    return content["rows"], content["parts"]


def in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each cell's last row, in the order of the grid."""
    cells = {Cell(**{name: row[name] for name in Cell._fields if name in row}): row for row in rows}

    def place(cell: Cell) -> tuple[Any, ...]:
        rule, policy = list(RULES).index(cell.rule), ALL_POLICIES.index(cell.policy)
        window = -1 if cell.window is None else cell.window
        return rule, policy, cell.retention or 0, cell.delay or 0, window

    return [cells[cell] for cell in sorted(cells, key=place)]


def load_model(max_num_batched_tokens: int) -> LLM:
    return LLM(checkpoint_path(), dtype="float32", max_num_batched_tokens=max_num_batched_tokens)


def make_parser() -> argparse.ArgumentParser:
    parser = case_parser("quality", __doc__)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--policies", nargs="+", choices=ALL_POLICIES, default=ALL_POLICIES)
    parser.add_argument("--retentions", nargs="+", type=float, default=RETENTIONS)
    parser.add_argument("--delays", nargs="+", type=int, default=DELAYS)
    parser.add_argument("--windows", nargs="*", type=int, default=[], help="suffix windows")
    parser.add_argument("--instances", type=int, default=2000, help="of each cell, over all tasks")
    parser.add_argument("--block-length", type=int, default=8)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--append", nargs="+", type=Path, default=[], help="files of other parts")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(arguments)
    here = environment()
    try:
        instances = draw_instances(args.instances)
        settings = {
            "model": "demo",
            "dtype": "float32",
            "instances": len(instances),
            "seed": SEED,
            "gen_length": GEN_LENGTH,
            "block_length": args.block_length,
            "device": here["device"],
        }
        cells = planned(args)
        appended = [read_part(path, settings) for path in args.append]
    except JdllmError as error:
        parser.error(str(error))
    parts = [part for _, parts in appended for part in parts]
    parts.append({key: here[key] for key in ("command", "date", "versions")})
    rows = list(itertools.chain.from_iterable(rows for rows, _ in appended))
    llm = load_model(args.max_num_batched_tokens)
    exact: dict[str, Answers] = {}
    for cell, sampling in cells:
        answers = measure(llm, instances, sampling)
        exact.setdefault(cell.rule, answers)
        new = row(cell, instances, answers, exact[cell.rule])
        print(*cell, f"{new['exact_match']:.1%} {answers.seconds:.0f} s", file=sys.stderr, flush=True)
        rows = in_order([*rows, new])
        compared = {"comparisons": comparisons(rows), "changes": changes(rows)}
        write(NAME, rows, args.out, settings=settings, parts=parts, **compared)
    print(tables(rows))


def planned(args: argparse.Namespace) -> list[tuple[Cell, SamplingParams]]:
    """The cells that were asked for; raises `RequestError` where one of them cannot be."""
    block_steps(GEN_LENGTH, GEN_LENGTH, args.block_length)
    cells = grid(args.rules, args.policies, args.retentions, args.delays, args.windows)
    return [(cell, cell.sampling(args.block_length)) for cell in cells]
