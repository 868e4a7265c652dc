"""Scores of given text: the Monte Carlo likelihood, and logits for checking."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdllm.chunks import ChunkConfig
from jdllm.decoding.executables import Executables
from jdllm.decoding.likelihood import Perturbation, all_logits, token_logprobs
from jdllm.decoding.non_finite import origin
from jdllm.errors import NonFiniteError
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.planning.account import Account
from jdllm.planning.buckets import head_bucket
from jdllm.planning.ladder import Entry
from jdllm.serving.fitting import check_fits
from jdllm.serving.packing import head_rows, lay_out


class Scorer:
    """Evaluates given sequences, a bounded number of packed rows at a time.

    Arguments:
    - `params`, `config`: the model, which must have a mask id for likelihoods.
    - `executables`: where compiled functions are kept.
    - `account`: the memory of the device, and packed rows of one evaluation; a longer sequence runs alone.
    - `run`: calls a function while nothing else runs on the device.
    - `max_logits`: rows whose logits exist at a time.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        executables: Executables,
        account: Account,
        run: Callable[[Callable[[], jax.Array]], jax.Array],
        max_logits: int,
    ):
        self._params = params
        self._config = config
        self._executables = executables
        self._account = account
        self._run = run
        self._max_logits = max_logits

    def log_likelihood(
        self,
        prompt: np.ndarray,
        answer: np.ndarray,
        perturbation: Perturbation,
        cfg_scale: float,
        mask_id: int,
    ) -> float:
        """Monte Carlo bound of log p(answer | prompt), natural logarithm.

        Arguments:
        - `prompt`, `answer`: int32 ids.
        - `perturbation`: the masks to average over, from `jdllm.decoding.likelihood.perturb`.
        - `cfg_scale`: classifier-free guidance, 0 for none.

        Exact for given masks. Source: get_log_likelihood.py of ML-GSAI/LLaDA.

        Raises `NonFiniteError` where values of the model are infinite or not numbers.
        """
        masks = perturbation.masked.reshape(-1, len(answer))
        sums = np.zeros(len(masks))
        copies = 2 if cfg_scale > 0 else 1
        size = max(self._account.rows // (copies * (len(prompt) + len(answer))), 1)
        for start in range(0, len(masks), size):
            part = slice(start, start + size)
            sums[part] = self._masked_logprobs(prompt, answer, masks[part], cfg_scale, mask_id)
        return float((sums / perturbation.ratio.reshape(-1)).mean())

    def _masked_logprobs(
        self, prompt: np.ndarray, answer: np.ndarray, masks: np.ndarray, cfg_scale: float, mask_id: int
    ) -> np.ndarray:
        """For each row of `masks` the sum of the log-probabilities of the masked answer tokens."""
        copies = 2 if cfg_scale > 0 else 1
        sequences = []
        for mask in masks:
            perturbed = np.where(mask, mask_id, answer)
            sequences += [np.concatenate([prompt, perturbed])]
            sequences += [np.concatenate([np.full_like(prompt, mask_id), perturbed])] * (copies - 1)
        tokens, rows, starts = lay_out(sequences, self._config)
        segment, column = np.nonzero(masks)
        row = starts[segment * copies] + len(prompt) + column
        unguided = starts[segment * copies + copies - 1] + len(prompt) + column
        entry = Entry(len(tokens), head_bucket(len(row)), len(masks), 1)
        head = head_rows(row, unguided, segment, entry)
        targets = np.zeros_like(head.row)
        targets[: len(row)] = answer[column]
        logprobs = self._call(
            token_logprobs,
            tokens,
            rows,
            head,
            np.full(len(targets), cfg_scale, np.float32),
            targets,
            config=self._config,
            chunks=ChunkConfig(logits=math.ceil(len(targets) / self._max_logits)),
        )
        found = np.asarray(logprobs, np.float64)[: len(row)]
        if not np.isfinite(found).all():
            raise self._non_finite(sequences)
        return np.bincount(segment, found, len(masks))

    def _non_finite(self, sequences: Sequence[np.ndarray]) -> NonFiniteError:
        places = (origin(self._params, self._config, x, self._executables) for x in sequences)
        found = next(filter(None, places), "the log-likelihood is infinite or not a number")
        return NonFiniteError(f"score: {found}")

    def _call(self, function: Callable[..., jax.Array], tokens: np.ndarray, *args: Any, **static: Any) -> Any:
        """Raises `MemoryBudgetError` where it does not fit, before it runs."""
        arguments = self._params, tokens, *args
        executable = self._executables.compile(function, *arguments, **static)
        check_fits(self._account, f"an evaluation of {len(tokens)} rows", len(tokens), executable)
        return self._run(lambda: executable(*arguments))

    def logits(self, token_ids: np.ndarray) -> np.ndarray:
        """f32 `[batch, length, vocab]` of int32 ids `[batch, length]`, before any shift, finite or not."""
        tokens, rows, _ = lay_out(list(token_ids), self._config)
        out = self._call(all_logits, tokens, rows, config=self._config, chunks=ChunkConfig())
        batch, length = token_ids.shape
        return jax.device_get(out)[: batch * length].reshape(batch, length, -1)
