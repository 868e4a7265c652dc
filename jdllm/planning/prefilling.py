"""What each stage of a long context takes: memory, pages of the pool and time, before anything runs."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

from jdllm.decoding.prefilling import Prefilling
from jdllm.execution.paged.pool import PAGE_ROWS, pool_bytes
from jdllm.models.weights import param_bytes
from jdllm.planning.account import Account
from jdllm.planning.buckets import fine_bucket, row_bucket
from jdllm.planning.plan import UNLIMITED, Bucket, Workload, plan_bucket
from jdllm.planning.step_time import RATES, step_flops


@dataclasses.dataclass(frozen=True)
class Question:
    """Tokens of a question over a long context: of its parts, of the answer, and of a block of it."""

    context: int
    instruction: int = 32
    query: int = 64
    gen_length: int = 32
    block_length: int = 32


class StagePlan(NamedTuple):
    """One stage.

    - `evaluations`: of the model; `rows`: packed rows of the largest.
    - `step_bytes`: temporaries of that one, as planned.
    - `stored_rows`: rows of the pool that it leaves.
    - `seconds`: an estimate for all its evaluations, from their arithmetic and the bytes that they read.
    """

    name: str
    evaluations: int
    rows: int
    step_bytes: int
    stored_rows: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class LongPlan:
    """A question over a long context on one card.

    - `workload`: the model and its type.
    - `account`: of an engine, whose largest step is a batch of chunks.
    - `target`: a card that `jdllm.planning.step_time.RATES` has.
    - `prefilling`, `question`: how the context is prepared, and the lengths of the question.
    """

    workload: Workload
    account: Account
    target: str
    prefilling: Prefilling
    question: Question

    @functools.cached_property
    def stages(self) -> list[StagePlan]:
        """The stages to run, in order."""
        return plan_stages(self.workload, self.account, self.target, self.prefilling, self.question)

    @property
    def seconds(self) -> float:
        """An estimate of the whole time."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def measured(self) -> bool:
        """Whether the seconds are at rates that were measured."""
        return RATES[self.target].measured and self.workload.dtype != "float32"

    @property
    def peak_bytes(self) -> int:
        """Bytes of the device during the largest stage."""
        overhead = 0 if self.account.budget is None else self.account.budget.overhead
        held = self.account.weights + overhead + self.account.pool_bytes
        return held + max(stage.step_bytes for stage in self.stages)

    @property
    def lacking(self) -> str | None:
        """What the engine has no room for, in words; `None` where all stages fit."""
        most, pages = self.account.max_refresh, self.account.pages - 1
        rows = _question_rows(self.workload, self.prefilling, self.question)
        rows = rows if rows <= self.account.rows else row_bucket(rows)
        if rows > most:
            return f"a question has a step of {rows} rows, and at most {most} fit"
        if self.pages > pages:
            return f"a question needs {self.pages} pages of the KV pool, which has {pages}"
        return None

    @property
    def pages(self) -> int:
        """Pages of the pool that a question needs."""
        return sum(stage.stored_rows for stage in self.stages if stage.name == "build") // PAGE_ROWS

    @property
    def transfer_seconds(self) -> float:
        """Of the whole time, for layers that come from host memory."""
        evaluations = sum(stage.evaluations for stage in self.stages)
        return evaluations * self.account.streamed / RATES[self.target].host_bytes


def plan_stages(
    workload: Workload, account: Account, target: str, prefilling: Prefilling, question: Question
) -> list[StagePlan]:
    """The stages of a question, in order.

    Arguments:
    - `workload`: the model and its type.
    - `account`: of an engine, whose largest step is a batch of chunks.
    - `target`: a card that `jdllm.planning.step_time.RATES` has.

    Steps of the answer are counted one for each token.
    """
    plan = _Planned(workload, account, target)
    chunks = -(-question.context // prefilling.chunk_length)
    lengths = _kept_lengths(prefilling, question)
    kept = len(lengths)
    draft, behind = prefilling.drafted, rows_behind(prefilling, question.query, workload.config.logits_shift)
    stages = []
    if draft:
        rounds = 1 if prefilling.draft_steps else prefilling.draft_rounds
        evaluations = 1 + (draft if rounds is None else rounds)
        stages.append(plan.stage("draft", evaluations, question.instruction + behind, draft))
    longest = _longest(prefilling, question)
    each = question.instruction + longest + behind
    evaluations = -(-chunks // max(1, account.rows // each))
    together = -(-chunks // evaluations)
    score = plan.stage("score", evaluations, together * each, together * behind, each)
    seconds = max(score.seconds * chunks / (together * evaluations), plan.streaming(evaluations))
    stages.append(score._replace(seconds=seconds))
    most = prefilling.tokens_kept or prefilling.chunk_length
    if most < longest:
        row = question.instruction + longest + prefilling.retention_window
        count = max(1, account.rows // row)
        stages.append(plan.stage("retain", -(-kept // count), min(kept, count) * row, 0, row))
    kept_rows = [min(most, length) for length in lengths]
    built = question.instruction + sum(kept_rows) + question.query + question.gen_length
    stages.append(plan.stage("build", 1, built, 1, stored=_stored(question, kept_rows)))
    return [*stages, plan.steps(question, built)]


def rows_behind(prefilling: Prefilling, query: int, shifted: bool) -> int:
    """Rows behind each chunk where it is scored: a query of so many tokens and the draft.

    Arguments:
    - `shifted`: whether the logits of the model are shifted. Without a shift a mask stands in for each token
      too.
    """
    scored = query + prefilling.drafted
    return scored if shifted else 2 * scored


def request_rows(
    prefilling: Prefilling, instruction: int, lengths: Sequence[int], query: int, tokens: int, shifted: bool
) -> int:
    """Packed rows of the largest evaluation of a request; chunks are scored as many at a time as fit.

    Arguments:
    - `instruction`, `query`: tokens before each chunk, and of the query that it is scored with.
    - `lengths`: tokens of the longest chunks, as many as are kept.
    - `tokens`: of the query and of the answer.
    - `shifted`: whether the logits of the model are shifted.
    """
    scoring = instruction + max(lengths, default=0) + rows_behind(prefilling, query, shifted)
    window = min(prefilling.retention_window, query + prefilling.drafted)
    return max(scoring, instruction + sum(lengths) + tokens + len(lengths) * (instruction + window))


def _question_rows(workload: Workload, prefilling: Prefilling, question: Question) -> int:
    lengths = _kept_lengths(prefilling, question)
    tokens, shifted = question.query + question.gen_length, workload.config.logits_shift
    return request_rows(prefilling, question.instruction, lengths, question.query, tokens, shifted)


def context_rows(prefilling: Prefilling, question: Question) -> int:
    """Rows of the pool that hold instruction and chunks, for further questions over the same context."""
    chunks = -(-question.context // prefilling.chunk_length)
    return _whole(question.instruction) + chunks * _whole(_longest(prefilling, question))


def _kept_lengths(prefilling: Prefilling, question: Question) -> list[int]:
    """Tokens of the longest chunks, as many as are kept, the longest first."""
    full, rest = divmod(question.context, prefilling.chunk_length)
    kept = prefilling.kept_of(full + (rest > 0))
    return [*(prefilling.chunk_length for _ in range(min(full, kept))), rest + prefilling.chunk_bos][:kept]


def _longest(prefilling: Prefilling, question: Question) -> int:
    """Tokens of the longest chunk; a short one grows by the token that begins it, where chunks have one."""
    return min(prefilling.chunk_length, question.context + prefilling.chunk_bos)


def _stored(question: Question, kept: Sequence[int]) -> int:
    """Rows of the pool for a question, of whose chunks so many rows each are kept."""
    blocks = -(-question.gen_length // question.block_length)
    parts = _whole(question.instruction) + _whole(question.query) + blocks * _whole(question.block_length)
    return parts + sum(map(_whole, kept))


def _whole(rows: int) -> int:
    """`rows`, in whole pages."""
    return -(-rows // PAGE_ROWS) * PAGE_ROWS


class _Planned:
    """Plans evaluations of one model on one card."""

    def __init__(self, workload: Workload, account: Account, target: str):
        most = workload.max_num_logits or account.max_num_logits
        self._workload = dataclasses.replace(workload, cache_policy="dual", max_num_logits=most)
        self._rates = RATES[target]
        self._weights = param_bytes(workload.config, workload.dtype)
        self._streamed = account.streamed

    def streaming(self, evaluations: int) -> float:
        """Seconds in which the layers that are in host memory come to the device, for so many evaluations."""
        return evaluations * self._streamed / self._rates.host_bytes

    def stage(
        self,
        name: str,
        evaluations: int,
        rows: int,
        head_rows: int,
        segment: int | None = None,
        stored: int = 0,
    ) -> StagePlan:
        """A stage of like evaluations, whose rows see the rows of their own segment."""
        config = self._workload.config
        size = row_bucket(rows) if rows < 512 else fine_bucket(rows)
        bucket = Bucket(rows, size, max(head_rows, 1))
        needed = plan_bucket(self._workload, bucket, UNLIMITED).activation.peak_bytes
        segment = segment or rows
        flops = rows / segment * step_flops(config, segment, round(head_rows * segment / rows))
        rate = self._rates.flops_f32 if self._workload.dtype == "float32" else self._rates.flops
        computing = evaluations * max(flops / rate, self._weights / self._rates.bytes)
        seconds = max(computing, self.streaming(evaluations))
        return StagePlan(name, evaluations, rows, needed, stored, seconds)

    def steps(self, question: Question, rows: int) -> StagePlan:
        """The steps of the answer, which read the weights and the stored keys and values."""
        page_bytes = pool_bytes(self._workload.config, self._workload.dtype, 1, PAGE_ROWS)
        read = self._weights + page_bytes * rows / PAGE_ROWS
        block = self.stage("answer", question.gen_length, question.block_length, question.block_length)
        reading = question.gen_length * read / self._rates.bytes
        return block._replace(seconds=max(reading, self.streaming(question.gen_length)))
