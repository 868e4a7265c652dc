"""The model class that lm-eval calls."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.errors import ConfigError
from jdllm.harness.likelihoods import likelihoods_of
from jdllm.harness.translation import (
    Pair,
    fitted,
    read_model_arguments,
    repeats_drawn_anew,
    request_sampling,
)
from jdllm.llm import LLM
from jdllm.serving.modes.registry import mode_of


class HarnessLM(LM):
    """A language model for lm-eval.

    Arguments:
    - `pretrained`: checkpoint directory or hub id.
    - `batch_size`, `max_batch_size`, `device`: lm-eval's own, without effect: requests share evaluations of
      up to `max_num_batched_tokens` rows, on JAX's first device.
    - others: see `ModelArguments`.

    Log-likelihoods are exact for causal models. For other models they are stratified Monte Carlo estimates of
    the bound, for block models block by block. Special tokens in a context become their ids, as for models
    of lm-eval: a rendered chat template has some. `llm` is the model.
    """

    def __init__(
        self,
        pretrained: str,
        batch_size: object = None,
        max_batch_size: object = None,
        device: object = None,
        **others: Any,
    ):
        super().__init__()
        self._name = str(pretrained)
        self._asked = read_model_arguments(others)
        self.llm = LLM(pretrained, **self._asked.of_llm)
        if self.llm.tokenizer is None:
            raise ConfigError(f"lm-eval asks with texts, and {pretrained} has no tokenizer files")
        self._tokenizer: Tokenizer = self.llm.tokenizer
        config = self.llm.config
        positions = config.rope.effective_context(config.max_positions)
        self._max_length = self._asked.max_length or positions
        self._likelihoods = likelihoods_of(self.llm, self._tokenizer, self._asked, self._max_length)
        # What holds for every request is refused before the first, if at all.
        sampling = request_sampling(self.llm.default_sampling(), self._asked.sampling, {})
        mode_of(config).check_sampling(sampling)

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval keeps rendered requests under."""
        return self._name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The checkpoint's template, for lm-eval's records."""
        return self._tokenizer.chat_template if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation; without `add_generation_prompt` its last message is continued."""
        if add_generation_prompt:
            return self._tokenizer.apply_chat_template(chat_history)
        *before, begun = chat_history
        return self._tokenizer.apply_chat_template(before) + begun["content"]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer (context, generation arguments) requests; the texts end before their stop strings."""
        default = self.llm.default_sampling()
        contexts = [request.args[0] for request in requests]
        asked = [request_sampling(default, self._asked.sampling, request.args[1]) for request in requests]
        sampling = repeats_drawn_anew(contexts, asked)
        pairs = [
            Pair(self._encode(context), [0] * params.gen_length)
            for context, params in zip(contexts, sampling, strict=True)
        ]
        kept = [fitted(pair, self._max_length) for pair in pairs]
        self._warn_of_length(pairs, kept)
        prompts = [pair.prompt for pair in kept]
        outputs = self.llm.generate(prompt_token_ids=prompts, sampling=sampling, progress=not disable_tqdm)
        texts = [output.text or "" for output in outputs]
        return self._remember("generate_until", requests, texts)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score (context, continuation) requests: log-likelihood, and whether it is the greedy answer."""
        pairs = [self._likelihoods.pair(*request.args) for request in requests]
        kept = [self._likelihoods.fitted(pair) for pair in pairs]
        self._warn_of_length(pairs, kept)
        found = self._likelihoods.with_greedy(kept, progress=not disable_tqdm)
        return self._remember("loglikelihood", requests, found)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, in parts where they are longer than the model's positions."""
        parts = [self._likelihoods.windows(request.args[0]) for request in requests]
        every = [pair for pairs in parts for pair in pairs]
        scores = iter(self._likelihoods.log_likelihoods(every, progress=not disable_tqdm))
        found = [sum(next(scores) for _ in pairs) for pairs in parts]
        return self._remember("loglikelihood_rolling", requests, found)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, parse_special=True)

    def _warn_of_length(self, pairs: Sequence[Pair], kept: Sequence[Pair]) -> None:
        cut = sum(len(one.prompt) < len(pair.prompt) for one, pair in zip(kept, pairs, strict=True))
        if cut:
            warnings.warn(
                f"{cut} of {len(pairs)} contexts are too long for max_length {self._max_length}:"
                " their beginnings are left out",
                stacklevel=3,
            )

    def _remember[T](self, kind: str, requests: Sequence[Instance], answers: list[T]) -> list[T]:
        """The answers, which lm-eval may keep for another run."""
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(kind, request.args, answer)
        return answers


def model_class(defaults: Mapping[str, Any]) -> type[HarnessLM]:
    """`HarnessLM` with other defaults."""

    class WithDefaults(HarnessLM):
        def __init__(self, **given: Any):
            super().__init__(**{**defaults, **given})

    return WithDefaults
