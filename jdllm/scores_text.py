"""What `LLM` says of texts that are given: likelihoods, probabilities of single tokens, logits."""

import abc
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from jdllm.arguments import shortened
from jdllm.choosing import Chain, OptionScores, in_text, shares_of
from jdllm.declarations import plain
from jdllm.decoding.likelihood import TokenScores
from jdllm.errors import RequestError, naming
from jdllm.models.config import ModelConfig
from jdllm.monte_carlo import MonteCarlo, block_pairs, check_exact, masked_pairs
from jdllm.pallas.masked_logits import LISTED
from jdllm.progress import counted
from jdllm.prompts import TokenIds
from jdllm.scoring import (
    Conditional,
    Likelihood,
    Scorer,
    conditionals_of,
    each_alone,
    exact_likelihood,
    following,
    one_masked,
    unmasked_ids,
)
from jdllm.serving.spec import checked_ids, mask_id_of

Pairs = Iterable[tuple[str | TokenIds, str | TokenIds]]


class ScoresText(abc.ABC):
    """The part of `LLM` that generates nothing.

    `config` belongs to the model.
    """

    config: ModelConfig

    @property
    @abc.abstractmethod
    def scorer(self) -> Scorer:
        """What evaluates given texts."""

    @abc.abstractmethod
    def _encode(self, text: str, *, parse_special: bool, begins: bool = True) -> list[int]:
        """The ids of a text; `begins`: with the special tokens that the tokenizer puts around one."""

    def score(
        self,
        prompt: str | TokenIds,
        answer: str | TokenIds,
        *,
        mc_num: int = 128,
        batch_size: int = 16,
        cfg_scale: float = 0.0,
        seed: int = 0,
        block_length: int | None = None,
        parse_special: bool = False,
    ) -> float:
        """log p(answer | prompt), natural logarithm: exact of a causal model, and otherwise estimated by
        stratified Monte Carlo.

        Arguments:
        - `prompt`, `answer`: texts or ids; the answer may not be empty. The prompt may, unless the model is
          causal or a block model with shifted logits: special tokens that begin a text, as far as the
          tokenizer has any, are before an empty text too. An answer has none.
        - `mc_num`: masked copies of the answer to average over; rounded down to batches of `batch_size`,
          in which the number of masks is stratified.
        - `cfg_scale`: classifier-free guidance.
        - `seed`: of the masks.
        - `block_length`: of a block model, positions of a block, by default those that the model has.
        - `parse_special`: special tokens in the texts become their ids; otherwise they are plain text.

        Of a causal model the sum over the answer's tokens, each given all before it, in one evaluation; and
        of a block model with a causal context. Otherwise an estimate of the model's bound; more copies, less
        variance. The same masks give the official script's value. Source: get_log_likelihood.py of
        ML-GSAI/LLaDA.

        Of a block model the sum over the blocks of the answer. A copy of a block sees the blocks before it
        without masks. At block length 1 the value is exact.

        Raises `RequestError` for an empty answer, ids outside the vocabulary, an empty prompt where the model
        needs one, and arguments that the model has no use for: with a causal model all that say how to
        estimate, unless they are the defaults, with a block model `cfg_scale`, and with others
        `block_length`.
        """
        found = self.likelihood(
            prompt,
            answer,
            mc_num=mc_num,
            batch_size=batch_size,
            cfg_scale=cfg_scale,
            seed=seed,
            block_length=block_length,
            parse_special=parse_special,
        )
        return found.log_likelihood

    def likelihood(
        self,
        prompt: str | TokenIds,
        answer: str | TokenIds,
        *,
        mc_num: int = 128,
        batch_size: int = 16,
        cfg_scale: float = 0.0,
        seed: int = 0,
        block_length: int | None = None,
        parse_special: bool = False,
    ) -> Likelihood:
        """`score`, with its standard error.

        Arguments and errors are the same as for `score`.

        Returns the value of `score` as `log_likelihood`, its `standard_error` from the spread of the batches
        (`None` where there is one only), and the copies that the mean is over, `mc_num`. An exact value has
        the error 0 and one copy.
        """
        [found] = self.likelihoods(
            [(prompt, answer)],
            mc_num=mc_num,
            batch_size=batch_size,
            cfg_scale=cfg_scale,
            seed=seed,
            block_length=block_length,
            parse_special=parse_special,
        )
        return found

    def likelihoods(
        self,
        pairs: Pairs,
        *,
        mc_num: int = 128,
        batch_size: int = 16,
        cfg_scale: float = 0.0,
        seed: int = 0,
        block_length: int | None = None,
        parse_special: bool = False,
        progress: bool = False,
    ) -> list[Likelihood]:
        """`likelihood` of each of many (prompt, answer) pairs, which share evaluations.

        Arguments:
        - `pairs`: texts or ids, in any mix.
        - `mc_num`, `batch_size`, `cfg_scale`, `seed`, `block_length`: how each likelihood is estimated, as
          `score` describes.
        - `parse_special`: special tokens in the texts become their ids; otherwise they are plain text.
        - `progress`: show a progress bar, if standard error is a terminal.

        Returns one for each pair, in order: in float32 the same numbers as one by one, up to rounding.
        """
        settings = MonteCarlo(mc_num, batch_size, cfg_scale, seed, block_length)
        if self.config.scored_in_order:
            check_exact(settings, self.config)
            return list(map(exact_likelihood, self._following("score", pairs, parse_special, progress)))
        mask_id, asked = mask_id_of(self.config), self._pairs(pairs, parse_special)
        if self.config.attention == "block_causal":
            in_blocks = block_pairs(asked, settings, self.config, mask_id)
            found = self.scorer.block_likelihoods(in_blocks, mask_id)
        else:
            found = self.scorer.likelihoods(masked_pairs(asked, settings), cfg_scale, mask_id)
        return _taken(found, len(asked), progress)

    def token_logprobs(
        self,
        pairs: Pairs,
        *,
        top_logprobs: int = 0,
        parse_special: bool = False,
        progress: bool = False,
    ) -> list[list[Conditional]]:
        """Score every token of each answer given the prompt and the tokens before it; of causal models and of
        those with a causal context.

        Arguments:
        - `pairs`: (prompt, answer), texts or ids in any mix; they share evaluations. To score a whole text,
          let its first token be the prompt.
        - `top_logprobs`: how many of the likeliest ids are reported for each token's place, up to 20.
        - `parse_special`: special tokens in the texts become their ids; otherwise they are plain text.
        - `progress`: show a progress bar, if standard error is a terminal.

        Returns for each pair one for each token of its answer. Their `logprob`s sum up to `score`, and an
        answer is what greedy decoding gives where each of its tokens is the `best`. Exact.

        Raises `RequestError` as `score` does, and for other models.
        """
        if not self.config.scored_in_order:
            blocks = self.config.attention == "block_causal"
            other = "score has the likelihood" if blocks else "pseudo_likelihood has what this one says"
            of = "of a whole answer of this one" if blocks else "of each token"
            raise RequestError(f"token_logprobs is for causal models: {other} {of}")
        listed = _listed(top_logprobs)
        scores = self._following("token_logprobs", pairs, parse_special, progress, listed)
        return [conditionals_of([found]) for found in scores]

    def conditionals(
        self, sequences: Iterable[TokenIds], positions: Sequence[int], targets: Sequence[int]
    ) -> list[Conditional]:
        """Ask for one token in each of many masked sequences.

        Arguments:
        - `sequences`: ids, with masks where tokens are missing; they share evaluations.
        - `positions`: one masked position of each.
        - `targets`: the id that is asked for there.

        Returns for each the f32 log-probability of its target, given all that is not masked, and the
        likeliest id with its own.

        Raises `RequestError` for a position that is not masked, for ids outside the vocabulary, and with a
        causal model, which has no masks.
        """
        mask_id = self._mask_id("conditionals")
        given = list(sequences)
        if not len(given) == len(positions) == len(targets):
            raise RequestError(
                f"{len(given)} sequences, {len(positions)} positions and {len(targets)} targets:"
                " give one position and one target for each sequence"
            )
        questions = []
        for i, asked in enumerate(zip(given, positions, targets, strict=True)):
            with naming("prompt", i, len(given)):
                questions.append(one_masked(*asked, mask_id, self.config))
        return conditionals_of(self.scorer.answers("conditionals", questions))

    def pseudo_likelihood(self, token_ids: TokenIds, *, top_logprobs: int = 0) -> list[Conditional]:
        """Score every token of a sequence given all others: each is masked alone.

        Arguments:
        - `token_ids`: ids without masks.
        - `top_logprobs`: how many of the likeliest ids are reported for each token's place, up to 20.

        Returns one for each token. Their `logprob`s sum up to the pseudo-log-likelihood of masked models,
        which is no likelihood: a token sees those after it. It takes the square of the length in rows.

        Raises `RequestError` for a mask among the ids, and with a causal model: see `token_logprobs`.
        """
        mask_id = self._mask_id("pseudo_likelihood")
        ids = unmasked_ids(token_ids, "the sequence", self.config)
        questions, listed = each_alone(ids, mask_id), _listed(top_logprobs)
        return conditionals_of(self.scorer.answers("pseudo_likelihood", questions, listed=listed))

    def choose(self, prefix: TokenIds, options: Iterable[TokenIds], suffix: TokenIds = ()) -> OptionScores:
        """Score options for a gap by the chain rule.

        Arguments:
        - `prefix`, `suffix`: ids around the gap; both may be empty and may have other masks, which stay. A
          causal model has no masks and needs a prefix.
        - `options`: ids of each, of any lengths. The gap is as long as the option.

        Returns the log-likelihood of each option, its tokens taken from left to right while those after them
        are masked, the share of each option in their sum, and the index of the best, of equals the first.
        Longer options are at a disadvantage, as in any likelihood.

        For a causal model the log-likelihoods are of option and suffix together, given the prefix: the
        shares are the probabilities of the options between prefix and suffix, among each other. Exact.

        Raises `RequestError` where there is no option, for one that is empty or has a mask, and with a causal
        model for an empty prefix.
        """
        if self.config.scored_in_order:
            self._check_begun("prefix", prefix)
            questions = in_text(prefix, list(options), suffix, self.config)
            scores = self.scorer.answers("choose", questions)
            return shares_of(np.array([exact_likelihood(found).log_likelihood for found in scores]))
        self._mask_id("choose")
        chain = Chain(prefix, list(options), suffix, self.config)
        return chain.option_scores(self.scorer.answers("choose", chain.questions))

    def _mask_id(self, what: str) -> int:
        if self.config.in_order:
            raise RequestError(
                f"{what} is for models that denoise: a causal model has no masks, but token_logprobs"
            )
        if self.config.attention == "block_causal":
            raise RequestError(f"{what} is for models that see whole sequences: a block model does not")
        return mask_id_of(self.config)

    def _check_begun(self, what: str, ids: TokenIds) -> None:
        if self._needs_begun and not len(ids):
            bos_id = self.config.bos_id
            such = "" if bos_id is None else f", such as the bos id {bos_id}"
            whose = "a causal model" if self.config.in_order else f"a {self.config.family} model"
            raise RequestError(f"the {what} is empty: {whose} needs a token before what it scores{such}")

    @property
    def _needs_begun(self) -> bool:
        """Whether the first token of a text has no row that predicts it."""
        shifted = self.config.logits_shift and self.config.attention == "block_causal"
        return self.config.scored_in_order or shifted

    def _pairs(self, pairs: Pairs, parse_special: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        """The ids of each prompt and answer, checked."""
        given = list(pairs)
        made = []
        for i, pair in enumerate(given):
            with naming("prompt", i, len(given)):
                if isinstance(pair, str) or len(pair) != 2:
                    raise RequestError(f"a pair is {shortened(pair)}, expected (prompt, answer)")
                prompt, answer = (
                    self._encode(x, parse_special=parse_special, begins=begins) if isinstance(x, str) else x
                    for x, begins in zip(pair, (True, False), strict=True)
                )
                if not len(answer):
                    raise RequestError("the answer is empty: give at least one token to score")
                self._check_begun("prompt", prompt)
                ids = checked_ids([*prompt, *answer], self.config)
                made.append((ids[: len(prompt)], ids[len(prompt) :]))
        return made

    def _following(
        self, what: str, pairs: Pairs, parse_special: bool, progress: bool, listed: int = 0
    ) -> list[TokenScores]:
        """Scores of each answer's tokens by a causal model; `what`: the call, for messages."""
        asked = self._pairs(pairs, parse_special)
        found = self.scorer.answers(what, itertools.starmap(following, asked), listed=listed)
        return _taken(found, len(asked), progress)

    def logits(self, token_ids: Sequence[TokenIds] | np.ndarray) -> np.ndarray:
        """Logits of every position, for checking.

        Arguments:
        - `token_ids`: ids `[batch, length]`.

        Returns f32 `[batch, length, vocab]`, before any shift, no row skipped.
        """
        try:
            ids = np.asarray(token_ids)
        except ValueError:
            ids = np.empty(0)
        if ids.ndim != 2 or not ids.size:
            raise RequestError("logits takes ids of shape [batch, length], all rows of one length")
        return self.scorer.logits(checked_ids(ids.reshape(-1), self.config).reshape(ids.shape))


def _listed(top_logprobs: int) -> int:
    asked = plain(top_logprobs)
    if not isinstance(asked, int) or isinstance(asked, bool) or not 0 <= asked <= LISTED:
        raise RequestError(f"top_logprobs is {shortened(asked)}, expected an integer from 0 to {LISTED}")
    return asked


def _taken[T](found: Iterable[T], total: int, progress: bool) -> list[T]:
    """What is found, one by one, as it is shown."""
    taken = []
    with counted("scoring", total, progress) as take:
        for one in found:
            taken.append(one)
            take(len(taken))
    return taken
