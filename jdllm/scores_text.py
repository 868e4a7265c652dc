"""What `LLM` says of texts that are given: likelihoods, probabilities of single tokens, logits."""

import abc
import functools
from collections.abc import Iterable, Sequence

import numpy as np

from jdllm.arguments import positive, shortened
from jdllm.decoding.likelihood import perturb
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig
from jdllm.progress import counted
from jdllm.prompts import TokenIds, naming_prompt
from jdllm.scoring import (
    Chain,
    Conditional,
    Likelihood,
    MaskedPair,
    OptionScores,
    Scorer,
    conditionals_of,
    each_alone,
    one_masked,
    unmasked_ids,
)
from jdllm.serving.spec import checked_ids, mask_id_of


class ScoresText(abc.ABC):
    """The part of `LLM` that generates nothing.

    `config` is that of the model.
    """

    config: ModelConfig

    @property
    @abc.abstractmethod
    def _scorer(self) -> Scorer:
        """What evaluates the model."""

    @abc.abstractmethod
    def _encode(self, text: str, *, parse_special: bool) -> list[int]:
        """The ids of a text."""

    def score(
        self,
        prompt: str | TokenIds,
        answer: str | TokenIds,
        *,
        mc_num: int = 128,
        batch_size: int = 16,
        cfg_scale: float = 0.0,
        seed: int = 0,
        parse_special: bool = False,
    ) -> float:
        """Estimate log p(answer | prompt), natural logarithm, by stratified Monte Carlo.

        Arguments:
        - `prompt`, `answer`: texts or ids; the prompt may be empty, the answer may not.
        - `mc_num`: masked copies of the answer to average over; rounded down to batches of `batch_size`,
          in which the number of masks is stratified.
        - `cfg_scale`: classifier-free guidance.
        - `seed`: of the masks.
        - `parse_special`: as for `generate`.

        Returns an estimate of the model's bound; more copies, less variance. The same masks give the
        official script's value. Source: get_log_likelihood.py of ML-GSAI/LLaDA.
        """
        [pair] = self._masked_pairs([(prompt, answer)], mc_num, batch_size, cfg_scale, seed, parse_special)
        return self._scorer.log_likelihood(*pair, cfg_scale, mask_id_of(self.config))

    def likelihood(
        self,
        prompt: str | TokenIds,
        answer: str | TokenIds,
        *,
        mc_num: int = 128,
        batch_size: int = 16,
        cfg_scale: float = 0.0,
        seed: int = 0,
        parse_special: bool = False,
    ) -> Likelihood:
        """`score`, with its standard error.

        Arguments and errors: as of `score`.

        Returns the value of `score` as `log_likelihood`, its `standard_error` from the spread of the batches
        (`None` where there is one only), and the copies that were evaluated, `mc_num`.
        """
        [found] = self.likelihoods(
            [(prompt, answer)],
            mc_num=mc_num,
            batch_size=batch_size,
            cfg_scale=cfg_scale,
            seed=seed,
            parse_special=parse_special,
        )
        return found

    def likelihoods(
        self,
        pairs: Iterable[tuple[str | TokenIds, str | TokenIds]],
        *,
        mc_num: int = 128,
        batch_size: int = 16,
        cfg_scale: float = 0.0,
        seed: int = 0,
        parse_special: bool = False,
        progress: bool = False,
    ) -> list[Likelihood]:
        """`likelihood` of each of many (prompt, answer) pairs, whose masked copies share evaluations.

        Arguments:
        - `pairs`: texts or ids, in any mix.
        - `progress`: show how far it has come, where standard error is a terminal.
        - others: as for `score`.

        Returns one for each pair, in order: in float32 the same numbers as one by one, up to rounding.
        """
        asked = self._masked_pairs(pairs, mc_num, batch_size, cfg_scale, seed, parse_special)
        found = []
        with counted("scoring", len(asked), progress) as take:
            for one in self._scorer.likelihoods(asked, cfg_scale, mask_id_of(self.config)):
                found.append(one)
                take(len(found))
        return found

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

        Raises `RequestError` for a position that is not masked and for ids outside the vocabulary.
        """
        given = list(sequences)
        if not len(given) == len(positions) == len(targets):
            raise RequestError(
                f"{len(given)} sequences, {len(positions)} positions and {len(targets)} targets:"
                " give one position and one target for each sequence"
            )
        mask_id = mask_id_of(self.config)
        questions = []
        for i, asked in enumerate(zip(given, positions, targets, strict=True)):
            with naming_prompt(i, len(given)):
                questions.append(one_masked(*asked, mask_id, self.config))
        return conditionals_of(self._scorer.answers("conditionals", questions))

    def pseudo_likelihood(self, token_ids: TokenIds) -> list[Conditional]:
        """Score every token of a sequence given all others: each is masked alone.

        Arguments:
        - `token_ids`: ids without masks.

        Returns one for each token. Their `logprob`s sum up to the pseudo-log-likelihood of masked models,
        which is no likelihood: a token sees those after it. It takes the square of the length in rows.
        """
        ids = unmasked_ids(token_ids, "the sequence", self.config)
        questions = each_alone(ids, mask_id_of(self.config))
        return conditionals_of(self._scorer.answers("pseudo_likelihood", questions))

    def choose(self, prefix: TokenIds, options: Iterable[TokenIds], suffix: TokenIds = ()) -> OptionScores:
        """Score options for a gap by the chain rule.

        Arguments:
        - `prefix`, `suffix`: ids around the gap; both may be empty and may have other masks, which stay.
        - `options`: ids of each, of any lengths. The gap is as long as the option.

        Returns the log-likelihood of each option, its tokens taken from left to right while those after them
        are masked, the share of each option in their sum, and the index of the best, of equals the first.
        Longer options are at a disadvantage, as in any likelihood.

        Raises `RequestError` where there is no option, and for one that is empty or has a mask.
        """
        chain = Chain(prefix, list(options), suffix, self.config)
        return chain.option_scores(self._scorer.answers("choose", chain.questions))

    def _masked_pairs(
        self,
        pairs: Iterable[tuple[str | TokenIds, str | TokenIds]],
        mc_num: int,
        batch_size: int,
        cfg_scale: float,
        seed: int,
        parse_special: bool,
    ) -> list[MaskedPair]:
        mc_num = positive("mc_num", mc_num, RequestError)
        batch_size = positive("batch_size", batch_size, RequestError)
        SamplingParams(cfg_scale=cfg_scale, seed=seed)  # refuses what a generation would refuse
        masks = functools.cache(lambda length: perturb(length, mc_num, min(batch_size, mc_num), seed))
        given = list(pairs)
        made = []
        for i, pair in enumerate(given):
            with naming_prompt(i, len(given)):
                if isinstance(pair, str) or len(pair) != 2:
                    raise RequestError(f"a pair is {shortened(pair)}, expected (prompt, answer)")
                prompt, answer = (
                    self._encode(x, parse_special=parse_special) if isinstance(x, str) else x for x in pair
                )
                if not len(answer):
                    raise RequestError("the answer is empty: give at least one token to score")
                ids = checked_ids([*prompt, *answer], self.config)
                made.append(MaskedPair(ids[: len(prompt)], ids[len(prompt) :], masks(len(answer))))
        return made

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
        return self._scorer.logits(checked_ids(ids.reshape(-1), self.config).reshape(ids.shape))
