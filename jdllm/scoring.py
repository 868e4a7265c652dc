"""Scores of given text: likelihoods, probabilities of single tokens, and logits for checking."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jdllm.arguments import shortened
from jdllm.arrays import padded
from jdllm.block_scoring import BlockPair, BlockQuestion, blocks_laid_out
from jdllm.chunks import UNCUT, ChunkConfig
from jdllm.compiling.executables import Executables, Program
from jdllm.decoding.head import Sources
from jdllm.decoding.likelihood import Asked, Perturbation, TokenScores, all_logits, token_logprobs
from jdllm.decoding.non_finite import origin
from jdllm.errors import NonFiniteError, RequestError
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.pallas.masked_logits import Likeliest
from jdllm.planning.account import Account
from jdllm.planning.buckets import head_bucket, row_bucket
from jdllm.planning.budget import MemoryBudgetError
from jdllm.planning.ladder import Entry, make_score_ladder
from jdllm.serving.fitting import check_fits
from jdllm.serving.packing import lay_out
from jdllm.serving.spec import checked_ids, mask_id_of
from jdllm.serving.speculation.request import as_causal


class Likelihood(NamedTuple):
    """log p(answer | prompt), natural logarithm: a Monte Carlo estimate, or a causal model's exact value.

    - `log_likelihood`: the mean over all masked copies of the answer; of a causal model the sum over its
      tokens.
    - `standard_error`: of that mean, from its batches, which are independent; `None` where there is only one,
      and 0 where the value is exact.
    - `mc_num`: masked copies that the mean is over; 1 where the value is exact, for the answer as it is.
    """

    log_likelihood: float
    standard_error: float | None
    mc_num: int


class Conditional(NamedTuple):
    """What the model says of one masked position, given the rest of its sequence, or of one position of a
    causal model, given what is before it.

    - `logprob`: log-probability of the token that was asked for, natural logarithm.
    - `best`, `best_logprob`: the likeliest id, of equals the lowest, and its log-probability.
    - `top_logprobs`: the likeliest ids with their log-probabilities, the likeliest first, as many as were
      asked for; `None` where none were.
    """

    logprob: float
    best: int
    best_logprob: float
    top_logprobs: dict[int, float] | None = None


class Question(NamedTuple):
    """Tokens that are asked for in one sequence.

    - `tokens`: int32 ids of the sequence, with masks unless the model is causal.
    - `positions`, `targets`: where, and which ids; a causal model may be asked for the token after the last.
    - `unguided`: the sequence without its prompt, for classifier-free guidance.
    """

    tokens: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    unguided: np.ndarray | None = None

    @property
    def copies(self) -> list[np.ndarray]:
        """The sequences that are evaluated; the last one is what guidance is taken from."""
        return [self.tokens] if self.unguided is None else [self.tokens, self.unguided]


class Evaluated(Protocol):
    """What one evaluation can answer: the sequences that it takes, and the ids that are asked for."""

    @property
    def copies(self) -> list[np.ndarray]: ...

    @property
    def targets(self) -> np.ndarray: ...


type Lay[Q] = Callable[[Sequence[Q], ModelConfig, Entry], Asked]
"""Lays questions out one after another in the sizes of an entry."""


class MaskedPair(NamedTuple):
    """A prompt, an answer, both int32 ids, and the masks that its likelihood is averaged over."""

    prompt: np.ndarray
    answer: np.ndarray
    perturbation: Perturbation


class Scorer:
    """Evaluates given sequences, a bounded number of packed rows at a time.

    Arguments:
    - `params`, `config`: the model.
    - `executables`: where compiled functions are kept.
    - `account`: the memory of the device, and packed rows of one evaluation; a longer sequence runs alone.
    - `run`: calls a function while nothing else runs on the device.
    - `max_logits`: rows whose logits exist at a time.

    Several threads may call it, and between two evaluations others may use the device. Sizes are those of the
    text, unless `warm` has compiled others that hold it.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        executables: Executables,
        account: Account,
        run: Callable[[Callable[[], Any]], Any],
        max_logits: int,
    ):
        self._params = params
        # Finished rows of such a model are those of a causal one.
        self._config = as_causal(config) if config.causal_context else config
        self._executables = executables
        self._account = account
        self.run = run
        self._max_logits = max_logits
        self._compiled: list[Entry] = []

    def programs(self) -> Iterator[Program]:
        """The programs for text of up to as many rows as one evaluation has."""
        return (self._program(asked, 0.0) for asked in self._asked_of_any())

    def warm(self) -> None:
        """Compile `programs`; those that do not fit the device are left out."""
        self._compiled = []
        for asked in self._asked_of_any():
            program, rows = self._program(asked, 0.0), len(asked.tokens)
            executable = self._executables.get(program)
            with contextlib.suppress(MemoryBudgetError):
                check_fits(self._account, program.name, rows, executable)
                self._compiled.append(Entry(rows, rows, 1, 1))

    def likelihoods(
        self, pairs: Sequence[MaskedPair], cfg_scale: float, mask_id: int
    ) -> Iterator[Likelihood]:
        """Monte Carlo bound of log p(answer | prompt) of each pair, in order.

        Arguments:
        - `pairs`: with masks from `jdllm.decoding.likelihood.perturb`. Those of several pairs share
          evaluations.
        - `cfg_scale`: classifier-free guidance, 0 for none.

        Exact for given masks. Source: get_log_likelihood.py of ML-GSAI/LLaDA.

        Raises `NonFiniteError` where values of the model are infinite or not numbers.
        """
        guided = cfg_scale > 0
        questions = itertools.chain.from_iterable(_masked_copies(pair, mask_id, guided) for pair in pairs)
        scores = self.answers("score", questions, cfg_scale)
        for pair in pairs:
            ratio = pair.perturbation.ratio
            sums = [found.logprob.sum(dtype=np.float64) for found in itertools.islice(scores, ratio.size)]
            yield _likelihood(np.reshape(sums, ratio.shape) / ratio)

    def block_likelihoods(self, pairs: Sequence[BlockPair], mask_id: int) -> Iterator[Likelihood]:
        """Monte Carlo bound of log p(answer | prompt) of each pair by a block model, in order: the sum over
        the blocks of the answer, each given all blocks before it.

        Arguments:
        - `pairs`: with masks. They share evaluations, and masked copies of the blocks of one share the rows
          of its sequence.

        Exact for given masks. Raises `NonFiniteError` where values of the model are infinite or not numbers.
        """
        rows = self._account.rows
        questions = itertools.chain.from_iterable(pair.questions(rows, mask_id) for pair in pairs)
        asked, told = itertools.tee(questions)
        found = zip(told, self._answers("score", asked, blocks_laid_out), strict=True)
        sums = (float(x) for question, scores in found for x in question.sums(np.asarray(scores.logprob)))
        for pair in pairs:
            estimates = pair.estimates(sums)
            yield Likelihood(float(estimates[0, 0]), 0.0, 1) if pair.exact else _likelihood(estimates)

    def answers(
        self, what: str, questions: Iterable[Question], cfg_scale: float = 0.0, listed: int = 0
    ) -> Iterator[TokenScores]:
        """Scores of the tokens that each question asks for, in order, as NumPy arrays.

        Arguments:
        - `what`: the call, for messages.
        - `questions`: taken as they are evaluated, as many at a time as fit an evaluation.
        - `cfg_scale`: classifier-free guidance of those that have an unguided copy.
        - `listed`: how many of the likeliest ids are told of each position.

        Raises `NonFiniteError` and `MemoryBudgetError`.
        """
        return self._answers(what, questions, laid_out, cfg_scale, listed)

    def _answers[Q: Evaluated](
        self, what: str, questions: Iterable[Q], lay: Lay[Q], cfg_scale: float = 0.0, listed: int = 0
    ) -> Iterator[TokenScores]:
        for group in _grouped(questions, self._account.rows):
            yield from self._evaluate(what, group, lay, cfg_scale, listed)

    def _evaluate[Q: Evaluated](
        self, what: str, questions: Sequence[Q], lay: Lay[Q], cfg_scale: float, listed: int
    ) -> Iterator[TokenScores]:
        sequences = [copy for question in questions for copy in question.copies]
        counts = [len(question.targets) for question in questions]
        rows, heads = sum(map(len, sequences)), sum(counts)
        compiled = (entry for entry in self._compiled if entry.holds(rows, heads, 1))
        entry = next(compiled, Entry(row_bucket(rows), head_bucket(heads), 1, 1))
        program = self._program(lay(questions, self._config, entry), cfg_scale, bool(listed))
        scores: TokenScores = self._call(program, entry.rows)
        if not listed:
            scores = scores._replace(likeliest=None)
        scores = jax.tree.map(lambda x: np.asarray(x)[:heads], scores)
        if not all(np.isfinite(x).all() for x in scores[:3]):
            raise self._non_finite(what, sequences)
        if scores.likeliest is not None:
            scores = scores._replace(likeliest=Likeliest(*(x[:, :listed] for x in scores.likeliest)))
        stops = np.cumsum(counts)
        parts = [slice(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]
        return (jax.tree.map(lambda x, part=part: x[part], scores) for part in parts)

    def _asked_of_any(self) -> Iterator[Asked]:
        """The smallest question, in the sizes of each entry of the ladder."""
        ids = np.zeros(2, np.int32)
        for entry in make_score_ladder(self._account.rows):
            if self._config.attention == "block_causal":
                block = BlockQuestion(ids[:0], ids[:1], ids[None], np.array([[False, True]]), ids[:1])
                yield blocks_laid_out([block], self._config, entry)
            else:
                yield laid_out([Question(ids, ids[:1], ids[:1])], self._config, entry)

    def _program(self, asked: Asked, cfg_scale: float, listed: bool = False) -> Program:
        rows, heads = len(asked.tokens), len(asked.targets)
        scale = np.full(heads, cfg_scale, np.float32)
        return Program(
            token_logprobs,
            (self._params, asked, scale, np.full(heads, listed)),
            {"config": self._config, "chunks": ChunkConfig(logits=math.ceil(heads / self._max_logits))},
            name=f"score of {rows} rows",
        )

    def _non_finite(self, what: str, sequences: Sequence[np.ndarray]) -> NonFiniteError:
        places = (origin(self._params, self._config, x, self._executables) for x in sequences)
        found = next(filter(None, places), "a log-probability is infinite or not a number")
        return NonFiniteError(f"{what}: {found}")

    def _call(self, program: Program, rows: int) -> Any:
        """Raises `MemoryBudgetError` where it does not fit, before it runs."""
        executable = self._executables.get(program)
        check_fits(self._account, f"an evaluation of {rows} rows", rows, executable)
        return self.run(lambda: executable(*program.args))

    def logits(self, token_ids: np.ndarray) -> np.ndarray:
        """f32 `[batch, length, vocab]` of int32 ids `[batch, length]`, before any shift, finite or not."""
        tokens, rows, _ = lay_out(list(token_ids), self._config)
        static = {"config": self._config, "chunks": UNCUT}
        out = self._call(Program(all_logits, (self._params, tokens, rows), static), len(tokens))
        batch, length = token_ids.shape
        return jax.device_get(out)[: batch * length].reshape(batch, length, -1)


def laid_out(questions: Sequence[Question], config: ModelConfig, entry: Entry) -> Asked:
    """The sequences of some questions one after another, in the sizes of an entry."""
    copies = [question.copies for question in questions]
    tokens, rows, starts = lay_out(list(itertools.chain.from_iterable(copies)), config, entry.rows)
    last = np.cumsum([len(each) for each in copies]) - 1
    first = last - [len(each) - 1 for each in copies]
    places = [_predicting(question.positions, config) for question in questions]
    sources = [
        np.concatenate([starts[copy] + place for copy, place in zip(which, places, strict=True)])
        for which in (first, last)
    ]
    targets = np.concatenate([question.targets for question in questions])
    *rest, target = (padded(x.astype(np.int32), entry.head_rows) for x in (*sources, targets))
    return Asked(tokens, rows, None, Sources(*rest), target)


def _predicting(positions: np.ndarray, config: ModelConfig) -> np.ndarray:
    """The positions that predict the tokens at `positions`: those before them where the model is causal, so
    that a token may lie behind the sequence, or where its logits are shifted."""
    if config.in_order or config.logits_shift:
        return np.maximum(positions - 1, 0)
    return positions


def one_masked(
    token_ids: Sequence[int] | np.ndarray, position: int, target: int, mask_id: int, config: ModelConfig
) -> Question:
    """A question after one masked position of a sequence; `RequestError` where it is not masked."""
    tokens = checked_ids(token_ids, config)
    if isinstance(position, bool) or not isinstance(position, int | np.integer):
        raise RequestError(f"position is {shortened(position)}, expected an integer")
    if not 0 <= position < len(tokens) or tokens[position] != mask_id:
        raise RequestError(f"position {position} is none of the masks (id {mask_id}) of {len(tokens)} tokens")
    return Question(tokens, np.array([position]), checked_ids([target], config))


def following(prompt: np.ndarray, answer: np.ndarray) -> Question:
    """A question after every token of `answer` given the tokens before it, for a causal model; `prompt` is
    not empty. The last token is not evaluated: its prediction is not needed."""
    ids = np.concatenate([prompt, answer])
    return Question(ids[:-1], np.arange(len(prompt), len(ids)), answer)


def exact_likelihood(found: TokenScores) -> Likelihood:
    """The likelihood of an answer, from the scores of the question that is `following` its prompt."""
    return Likelihood(float(found.logprob.sum(dtype=np.float64)), 0.0, 1)


def unmasked_ids(token_ids: Sequence[int] | np.ndarray, what: str, config: ModelConfig) -> np.ndarray:
    """`token_ids` as int32; `RequestError` where there is none, or a mask among them."""
    tokens = checked_ids(token_ids, config)
    masks = np.flatnonzero(tokens == mask_id_of(config))
    if len(masks):
        raise RequestError(
            f"{what} has the mask id {config.mask_id} at position {masks[0]}: nothing to score"
        )
    return tokens


def each_alone(tokens: np.ndarray, mask_id: int) -> Iterator[Question]:
    """For every position of int32 `tokens` a question after its token, with that one masked alone."""
    for position, token in enumerate(tokens):
        masked = tokens.copy()
        masked[position] = mask_id
        yield Question(masked, np.array([position]), np.array([token]))


def conditionals_of(scores: Iterable[TokenScores]) -> list[Conditional]:
    """One after another what was asked for."""
    return [
        Conditional(*one)
        for found in scores
        for one in zip(*(part.tolist() for part in found[:3]), _tops(found), strict=True)
    ]


def _tops(found: TokenScores) -> list[dict[int, float] | None]:
    if found.likeliest is None:
        return [None] * len(found.logprob)
    rows = zip(*(x.tolist() for x in found.likeliest), strict=True)
    return [{i: p for i, p in zip(*row, strict=True) if p > -math.inf} for row in rows]


def _masked_copies(pair: MaskedPair, mask_id: int, guided: bool) -> Iterator[Question]:
    prompt, answer = pair.prompt, pair.answer
    hidden = np.full_like(prompt, mask_id)
    for mask in pair.perturbation.masked.reshape(-1, len(answer)):
        perturbed = np.where(mask, mask_id, answer)
        places = np.flatnonzero(mask)
        unguided = np.concatenate([hidden, perturbed]) if guided else None
        tokens = np.concatenate([prompt, perturbed])
        yield Question(tokens, len(prompt) + places, answer[places], unguided)


def _likelihood(estimates: np.ndarray) -> Likelihood:
    """From one estimate for each masked copy, `[iterations, batch]`."""
    means = estimates.mean(axis=1)
    error = float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None
    return Likelihood(float(estimates.mean()), error, estimates.size)


def _grouped[Q: Evaluated](questions: Iterable[Q], rows: int) -> Iterator[list[Q]]:
    """Questions in order, together as long as their sequences have at most `rows` rows, or one alone."""
    group: list[Q] = []
    taken = 0
    for question in questions:
        size = sum(map(len, question.copies))
        if group and taken + size > rows:
            yield group
            group, taken = [], 0
        group.append(question)
        taken += size
    if group:
        yield group
