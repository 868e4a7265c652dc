"""The model class that lm-eval calls."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import ConfigError
from jdllm.harness.translation import (
    Pair,
    encode_pair,
    fitted,
    read_model_arguments,
    repeats_drawn_anew,
    request_sampling,
    windows,
)
from jdllm.llm import LLM
from jdllm.serving.spec import mask_id_of


class DiffusionLM(LM):
    """A diffusion language model for lm-eval.

    Arguments:
    - `pretrained`: checkpoint directory or hub id.
    - `batch_size`, `max_batch_size`, `device`: lm-eval's own, without effect: requests share evaluations of
      up to `max_num_batched_tokens` rows, on JAX's first device.
    - others: see `ModelArguments`.

    Log-likelihoods are stratified Monte Carlo estimates of the model's bound, as LLaDA's evaluation has them.
    Special tokens in a context become their ids, as for the models of lm-eval: a rendered chat template has
    some.
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
        self._llm = LLM(pretrained, **self._asked.of_llm)
        if self._llm.tokenizer is None:
            raise ConfigError(f"lm-eval asks with texts, and {pretrained} has no tokenizer files")
        self._tokenizer: Tokenizer = self._llm.tokenizer
        config = self._llm.config
        self._mask_id = mask_id_of(config)
        positions = config.rope.effective_context(config.max_positions)
        self._max_length = self._asked.max_length or positions
        # What holds for every request is refused before the first, if at all.
        request_sampling(self._llm.default_sampling(), self._asked.sampling, {})

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
        """Answer (context, generation arguments) requests; the texts end before what they stop at."""
        default = self._llm.default_sampling()
        contexts = [request.args[0] for request in requests]
        asked = [request_sampling(default, self._asked.sampling, request.args[1]) for request in requests]
        sampling = repeats_drawn_anew(contexts, asked)
        pairs = [
            Pair(self._encode(context), [self._mask_id] * params.gen_length)
            for context, params in zip(contexts, sampling, strict=True)
        ]
        prompts = [pair.prompt for pair in self._fitted(pairs)]
        outputs = self._llm.generate(prompt_token_ids=prompts, sampling=sampling, progress=not disable_tqdm)
        texts = [output.text or "" for output in outputs]
        return self._remember("generate_until", requests, texts)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score (context, continuation) requests: log-likelihood, and whether it is the greedy answer."""
        pairs = self._fitted([encode_pair(self._encode, *request.args) for request in requests])
        greedy = self._greedy(pairs, disable_tqdm)
        found = list(zip(self._likelihoods(pairs, disable_tqdm), greedy, strict=True))
        return self._remember("loglikelihood", requests, found)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, in parts where they are longer than the model's positions."""
        parts = [windows(self._encode(request.args[0]), self._max_length) for request in requests]
        scores = iter(self._likelihoods([pair for pairs in parts for pair in pairs], disable_tqdm))
        found = [sum(next(scores) for _ in pairs) for pairs in parts]
        return self._remember("loglikelihood_rolling", requests, found)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, parse_special=True)

    def _fitted(self, pairs: Sequence[Pair]) -> list[Pair]:
        """The pairs in as many positions as there are."""
        kept = [fitted(pair, self._max_length) for pair in pairs]
        cut = sum(len(one.prompt) < len(pair.prompt) for one, pair in zip(kept, pairs, strict=True))
        if cut:
            warnings.warn(
                f"{cut} of {len(pairs)} contexts are too long for max_length {self._max_length}:"
                " their beginnings are left out",
                stacklevel=3,
            )
        return kept

    def _likelihoods(self, pairs: Sequence[Pair], disable_tqdm: bool) -> list[float]:
        found = self._llm.likelihoods(
            pairs,
            mc_num=self._asked.mc_num,
            batch_size=self._asked.mc_batch_size,
            cfg_scale=self._asked.sampling.get("cfg_scale", 0.0),
            seed=self._asked.sampling.get("seed", 0),
            progress=not disable_tqdm,
        )
        return [one.log_likelihood for one in found]

    def _greedy(self, pairs: Sequence[Pair], disable_tqdm: bool) -> list[bool]:
        """Whether each answer is what the model fills its place with, the surest token first.

        Source: suffix_greedy_prediction of eval_llada.py of ML-GSAI/LLaDA.
        """
        if not self._asked.is_check_greedy:
            return [False] * len(pairs)
        sampling = SamplingParams(cfg_scale=self._asked.sampling.get("cfg_scale", 0.0))
        masked = [[*pair.prompt, *[self._mask_id] * len(pair.answer)] for pair in pairs]
        outputs = self._llm.infill(token_ids=masked, sampling=sampling, progress=not disable_tqdm)
        return [
            output.token_ids[len(pair.prompt) :] == pair.answer
            for output, pair in zip(outputs, pairs, strict=True)
        ]

    def _remember[T](self, kind: str, requests: Sequence[Instance], answers: list[T]) -> list[T]:
        """The answers, which lm-eval may keep for another run."""
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(kind, request.args, answer)
        return answers


def model_class(defaults: Mapping[str, Any]) -> type[DiffusionLM]:
    """`DiffusionLM` with other defaults."""

    class WithDefaults(DiffusionLM):
        def __init__(self, **given: Any):
            super().__init__(**{**defaults, **given})

    return WithDefaults
