"""`LLM`: a model from a checkpoint directory to text."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdllm.decoding.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.score import perturb
from jdllm.errors import ConfigError, RequestError
from jdllm.models.config import ModelConfig, read_config
from jdllm.models.loading import load_params, resolve, resolve_dtype
from jdllm.models.module import Transformer
from jdllm.models.tokenizer import Tokenizer, complete_ids, load_tokenizer
from jdllm.outputs import RequestOutput
from jdllm.planning.budget import device_budget
from jdllm.planning.chunks import ChunkConfig
from jdllm.scoring import Scorer
from jdllm.serving.engine import Engine, StepUpdate
from jdllm.serving.request import Request, checked_ids, generation_request, infill_request, mask_id_of
from jdllm.serving.runner import StepRunner
from jdllm.serving.verifier import load_verifier

TokenIds = Sequence[int] | np.ndarray
Sampling = SamplingParams | Sequence[SamplingParams]
OnStep = Callable[[StepUpdate], None]

_DEFAULT = SamplingParams()


class LLM:
    """A diffusion language model, ready to generate, infill and score.

    Arguments:
    - `model`: a Hugging Face checkpoint directory or hub id, or a `Transformer` that is already in memory.
    - `dtype`: "float32", "bfloat16", "float16", or "auto" for that of the checkpoint. Results equal the
      official sampler's token by token in float32 at temperature 0.
    - `max_num_batched_tokens`: packed rows of one step over all requests; a longer request runs alone.
    - `max_num_logits`: masked rows whose logits may exist at a time; by default as many as fit, and 512 on a
      CPU without `memory`.
    - `memory`: what the device may hold in all, weights and CUDA context included, in bytes or as "24GiB"; by
      default everything that XLA may allot. Every step is planned and compiled within it before it runs.
    - `host_memory`: pinned host memory that a step may use where the device is too small; "0" for none.
    - `chunks`: fixed chunk counts for every step, instead of planned ones.
    - `hf_overrides`: values that replace those of `config.json`, such as `{"eos_token_id": 7}`.
    - `verifier`: an autoregressive model (Qwen2 for Dream) for `SamplingParams(transfer="adaptive")`: its
      checkpoint directory or hub id, loaded in the dtype of the model, or a `Transformer`. Its weights stay
      on the device beside the model's and count against `memory`. It must have the model's tokenizer; either
      may define further ids after the common ones.
    - `verifier_shares_ids`: where not both tokenizers are known (token ids only, or a `Transformer`), take
      vocabularies of different sizes to agree up to the end of the smaller one.
    - `progress`: show a progress bar while loading, where standard error is a terminal.

    Raises `ConfigError` or `CheckpointError` for a model that cannot be run or read, and for a verifier that
    is not causal or has another tokenizer. A call whose step does not fit `memory` raises `MemoryBudgetError`
    before anything of that step has run.
    """

    def __init__(
        self,
        model: str | Path | Transformer,
        *,
        dtype: str = "auto",
        max_num_batched_tokens: int = 8192,
        max_num_logits: int | None = None,
        memory: int | str | None = None,
        host_memory: int | str = "64GiB",
        chunks: ChunkConfig | None = None,
        hf_overrides: Mapping[str, Any] | None = None,
        verifier: str | Path | Transformer | None = None,
        verifier_shares_ids: bool = False,
        progress: bool = True,
    ):
        for name, value in (
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_num_logits", 1 if max_num_logits is None else max_num_logits),
        ):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}, expected a positive integer")
        self.tokenizer: Tokenizer | None = None
        if isinstance(model, Transformer):
            if dtype != "auto" or hf_overrides:
                raise ConfigError("dtype and hf_overrides are for checkpoints: a Transformer has its own")
        else:
            model = self._load(model, dtype, hf_overrides or {}, progress)
        self.config = model.config
        params = model.params()
        device = next(iter(jax.tree.leaves(params)[0].devices()))
        executables = Executables(device.platform)
        runner = StepRunner(
            params,
            self.config,
            executables,
            budget=device_budget(device, memory, host_memory),
            chunks=chunks,
            max_num_logits=max_num_logits,
            verifier=None
            if verifier is None
            else load_verifier(
                verifier,
                self.config,
                self.tokenizer,
                params["final_norm"].dtype.name,
                shares_ids=verifier_shares_ids,
                progress=progress,
            ),
        )
        self._engine = Engine(runner, self.config, max_num_batched_tokens)
        self._scorer = Scorer(params, self.config, executables, max_num_batched_tokens, max_num_logits or 512)

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        prompt_token_ids: Sequence[TokenIds] | None = None,
        sampling: Sampling = _DEFAULT,
        on_step: OnStep | None = None,
    ) -> list[RequestOutput]:
        """Generate after each prompt.

        Arguments:
        - `prompts`: texts (or one text), encoded as they are: apply `chat_prompt` first where the model
          expects a chat.
        - `prompt_token_ids`: ids instead of texts, one list for each prompt.
        - `sampling`: for all prompts, or one for each.
        - `on_step`: called with a `StepUpdate` after each step of each request, as it happens; without it
          the device runs a block at a time. Tokens do not depend on it, nor on the other prompts.

        Returns one output for each prompt, in order. Exact as `SamplingParams` says.

        Raises `RequestError` for a prompt or parameter that cannot be served.
        """
        given, ids = self._inputs(prompts, prompt_token_ids, "prompts", "prompt_token_ids")
        requests = self._requests(generation_request, ids, sampling)
        self._warn_of_length(requests)
        self._run(requests, on_step)
        return [self._output(r, text) for r, text in zip(requests, given, strict=True)]

    def infill(
        self,
        texts: str | Sequence[str] | None = None,
        *,
        token_ids: Sequence[TokenIds] | None = None,
        sampling: Sampling = _DEFAULT,
        on_step: OnStep | None = None,
    ) -> list[RequestOutput]:
        """Fill the masks inside each sequence.

        The masked positions, in order, form blocks of `block_length` masks (all of them by default), each
        denoised in its share of `steps` (one a mask by default) before the next; see
        `jdllm.serving.request.infill_request`. Not a mode of the official sampler; its rules per step are.

        Arguments as for `generate`; a text holds the tokenizer's mask token where something is missing.

        Returns one output for each sequence, whose `token_ids` and `text` are the whole sequence.
        """
        given, ids = self._inputs(texts, token_ids, "texts", "token_ids")
        requests = self._requests(infill_request, ids, sampling)
        self._warn_of_length(requests)
        self._run(requests, on_step)
        return [self._output(r, text) for r, text in zip(requests, given, strict=True)]

    def score(
        self,
        prompt: str | TokenIds,
        answer: str | TokenIds,
        *,
        mc_num: int = 128,
        batch_size: int = 16,
        cfg_scale: float = 0.0,
        seed: int = 0,
    ) -> float:
        """Estimate log p(answer | prompt), natural logarithm, by stratified Monte Carlo.

        Arguments:
        - `prompt`, `answer`: texts or ids; the prompt may be empty, the answer may not.
        - `mc_num`: masked copies of the answer to average over; rounded down to batches of `batch_size`,
          in which the number of masks is stratified.
        - `cfg_scale`: classifier-free guidance.
        - `seed`: of the masks.

        Returns an estimate of the model's bound; more copies, less variance. The same masks give the
        official script's value. Source: get_log_likelihood.py of ML-GSAI/LLaDA.
        """
        if mc_num < 1 or batch_size < 1:
            raise RequestError(f"mc_num {mc_num} and batch_size {batch_size} must be positive")
        SamplingParams(cfg_scale=cfg_scale, seed=seed)  # refuses what a generation would refuse
        prompt_ids, answer_ids = (self._encode(x) if isinstance(x, str) else x for x in (prompt, answer))
        if not len(answer_ids):
            raise RequestError("the answer is empty: give at least one token to score")
        ids = checked_ids([*prompt_ids, *answer_ids], self.config)
        prompt_ids, answer_ids = np.split(ids, [len(prompt_ids)])
        masks = perturb(len(answer_ids), mc_num, min(batch_size, mc_num), seed)
        return self._scorer.log_likelihood(prompt_ids, answer_ids, masks, cfg_scale, mask_id_of(self.config))

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

    def chat_prompt(self, messages: str | Sequence[Mapping[str, str]]) -> str:
        """Render messages (or one user message) with the model's chat template, ready for `generate`."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self._needs_tokenizer("a chat template").apply_chat_template(messages)

    def _load(
        self, model: str | Path, dtype: str, overrides: Mapping[str, Any], progress: bool
    ) -> Transformer:
        path = resolve(model)
        config = ModelConfig.from_hf({**read_config(path), **overrides})
        params = load_params(path, config, resolve_dtype(path, config, dtype), progress=progress)
        self.tokenizer = load_tokenizer(path)
        if self.tokenizer is not None:
            config = complete_ids(config, self.tokenizer)
            config = dataclasses.replace(config, token_limit=len(self.tokenizer))
        return Transformer(config, params)

    def _inputs(
        self,
        texts: str | Sequence[str] | None,
        ids: Sequence[TokenIds] | None,
        texts_name: str,
        ids_name: str,
    ) -> tuple[Sequence[str | None], Sequence[TokenIds]]:
        for name, value in ((texts_name, texts), (ids_name, ids)):
            if not isinstance(value, Iterable | None):
                raise RequestError(f"{name} is {value!r}, expected one entry for each prompt")
        if texts is not None and ids is None:
            texts = [texts] if isinstance(texts, str) else texts
            return texts, [self._encode(text) for text in texts]
        if ids is not None and texts is None:
            return [None] * len(ids), ids
        raise RequestError(f"give either {texts_name} or {ids_name}")

    def _encode(self, text: str) -> list[int]:
        return self._needs_tokenizer("a text prompt").encode(text)

    def _needs_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs tokenizer files (tokenizer.json), which this model has not: use token ids"
            )
        return self.tokenizer

    def _requests(
        self, make: Callable[..., Request], ids: Sequence[TokenIds], sampling: Sampling
    ) -> list[Request]:
        each = [sampling] * len(ids) if isinstance(sampling, SamplingParams) else sampling
        if not isinstance(each, Sequence) or not all(isinstance(s, SamplingParams) for s in each):
            raise RequestError("sampling must be SamplingParams: one for all prompts, or one for each")
        if len(each) != len(ids):
            raise RequestError(
                f"{len(each)} sampling parameters for {len(ids)} prompts: give one for all or each"
            )
        return [make(i, x, s, self.config) for i, (x, s) in enumerate(zip(ids, each, strict=True))]

    def _warn_of_length(self, requests: list[Request]) -> None:
        longest = max((len(r.tokens) for r in requests), default=0)
        limit = self.config.rope.effective_context(self.config.max_positions)
        if longest > limit:
            warnings.warn(
                f"a sequence of {longest} tokens is longer than the {limit} positions of the model:"
                " quality beyond them is not assured",
                stacklevel=3,
            )

    def _run(self, requests: list[Request], on_step: OnStep | None) -> None:
        for update in self._engine.run(requests, every_step=on_step is not None):
            if on_step is not None:
                on_step(update)

    def _output(self, request: Request, prompt: str | None) -> RequestOutput:
        end = request.end_of_text()
        text = request.tokens[request.returned][:end]
        kept = request.tokens[request.returned]
        if end is not None and request.sampling.early_stop:
            kept = kept[: end + 1]
        return RequestOutput(
            prompt=prompt,
            prompt_token_ids=request.prompt.tolist(),
            token_ids=kept.tolist(),
            text=None if self.tokenizer is None else self.tokenizer.decode(text.tolist()),
            finish_reason="length" if end is None else "stop",
            nfe=request.steps,
            timings=request.timings(),
            history=np.stack(request.history) if request.sampling.return_history else None,
        )
