"""What `LLM` makes of prompts: generated, streamed, chatted and infilled text."""

import abc
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jdllm.arguments import shortened
from jdllm.checkpoints.conversation import Rendering
from jdllm.checkpoints.token_text import Decode
from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.decoding.bad_words import spelled
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import NonFiniteError, RequestError, naming
from jdllm.models.config import ModelConfig
from jdllm.outputs import RequestOutput, request_output
from jdllm.progress import shown
from jdllm.prompts import (
    AskedPrompt,
    Conversation,
    Prompt,
    PromptLike,
    TokenIds,
    ask,
    read_conversation,
    read_conversations,
    read_prompts,
    same_on_all,
    sampling_for_each,
    specs_of,
)
from jdllm.serving.engine import Engine, Updates
from jdllm.serving.long.request import LongContext, long_spec
from jdllm.serving.modes.registry import mode_of
from jdllm.serving.request import Request
from jdllm.serving.spec import RequestSpec
from jdllm.serving.updates import StepUpdate, Update
from jdllm.structured.grammars import Grammars

Sampling = SamplingParams | Iterable[SamplingParams]
OnStep = Callable[[StepUpdate], None]


class GeneratesText(abc.ABC):
    """The part of `LLM` that generates.

    `config` and `tokenizer` belong to the model.
    """

    config: ModelConfig
    tokenizer: Tokenizer | None

    @property
    @abc.abstractmethod
    def engine(self) -> Engine:
        """What runs the requests."""

    @abc.abstractmethod
    def default_sampling(self) -> SamplingParams:
        """What applies where a call gives no sampling parameters."""

    def generate(
        self,
        prompts: PromptLike | Iterable[PromptLike] | None = None,
        sampling_params: Sampling | None = None,
        *,
        sampling: Sampling | None = None,
        prompt_token_ids: Iterable[TokenIds] | None = None,
        on_step: OnStep | None = None,
        parse_special: bool = False,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate after each prompt.

        Arguments:
        - `prompts`: texts, `{"prompt": text}`, `{"prompt_token_ids": ids}` or `LongPrompt`, one of them or
          any iterable of them, encoded as they are: `chat` is for models that expect a conversation. An empty
          text or list asks for any text.
        - `sampling_params`, or `sampling`: for all prompts, or one for each; by default `default_sampling()`.
        - `prompt_token_ids`: ids instead of texts, one list for each prompt.
        - `on_step`: called with a `StepUpdate` after each step of each request, as it happens; without it
          the device runs a block at a time. Tokens do not depend on it, nor on the other prompts. Each of a
          prompt's `n` samples is a request; they are counted in order of the prompts.
        - `parse_special`: special tokens in the texts become their ids; otherwise they are plain text.
        - `progress`: show how far it has come, where standard error is a terminal.

        Returns one output for each prompt, in order. Exact as `SamplingParams` says.

        Raises `RequestError` for a prompt or parameter that cannot be served, before anything has run.
        """
        given = read_prompts(
            prompts,
            prompt_token_ids,
            functools.partial(self._encode, parse_special=parse_special),
            ("prompts", "prompt_token_ids"),
        )
        asked = _given_once(sampling_params, sampling, self.default_sampling())
        return self._answer(self.spec, given, asked, on_step, progress)

    def stream(
        self,
        prompts: PromptLike | Iterable[PromptLike] | None = None,
        sampling_params: Sampling | None = None,
        *,
        sampling: Sampling | None = None,
        prompt_token_ids: Iterable[TokenIds] | None = None,
        parse_special: bool = False,
    ) -> Iterator[StepUpdate | RequestOutput]:
        """`generate`, as it happens.

        Arguments and errors are the same as for `generate`; errors come before anything has run.

        Yields a `StepUpdate` after each step of each request, and the output of a prompt as soon as its
        samples are finished. Leaving the iteration ends all other samples.
        """
        given = read_prompts(
            prompts,
            prompt_token_ids,
            functools.partial(self._encode, parse_special=parse_special),
            ("prompts", "prompt_token_ids"),
        )
        each = _given_once(sampling_params, sampling, self.default_sampling())
        asked = self._ask(self.spec, given, each)
        return (update for _, update in self._run(asked, updates="every"))

    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: Sampling | None = None,
        *,
        sampling: Sampling | None = None,
        context: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_step: OnStep | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, by the model's chat template.

        Arguments:
        - `messages`: one conversation: the text of a user, or messages with `role` and `content`, whose
          content is a text or a list of `{"type": "text", "text": ...}`; or a list of such lists. What else a
          message has, such as `tool_calls`, is given to the template.
        - `context`: stands at the beginning of the last message, and is prepared as
          `SamplingParams.prefilling` says; what the template has before it is the instruction of a
          `LongPrompt`, what it has behind it the query.
        - `add_generation_prompt`: end with the beginning of an answer; by default unless the last message is
          continued.
        - `continue_final_message`: end inside the last message; the answer continues the message.
        - `chat_template_kwargs`: variables of the template, such as `{"enable_thinking": False}`.
        - `sampling_params`, or `sampling`: for all conversations, or one for each.
        - `on_step`: called with a `StepUpdate` after each step of each request, as it happens.
        - `progress`: show a progress bar, if standard error is a terminal.

        Returns one output for each conversation, in order; its `prompt` is the rendered template. Special
        tokens in the messages are plain text: only what the template itself says is special.

        Raises `RequestError` as `generate` does, and where there is no template or it refuses the messages.
        """
        tokenizer = self._needs_tokenizer("a chat template")
        conversations = read_conversations(messages)
        rendering = Rendering(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs or {},
        )
        given = []
        for i, conversation in enumerate(conversations):
            with naming("prompt", i, len(conversations)):
                given.append(read_conversation(conversation, tokenizer, context, rendering))
        asked = _given_once(sampling_params, sampling, self.default_sampling())
        return self._answer(self.spec, given, asked, on_step, progress)

    def infill(
        self,
        texts: PromptLike | Iterable[PromptLike] | None = None,
        sampling_params: Sampling | None = None,
        *,
        sampling: Sampling | None = None,
        token_ids: Iterable[TokenIds] | None = None,
        on_step: OnStep | None = None,
        parse_special: bool = False,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Fill the masks inside each sequence; a causal model has none.

        The masked positions, in order, form blocks of `block_length` masks (all of them by default), each
        denoised in its share of `steps` (one a mask by default) before the next; see
        `jdllm.serving.spec.infill_spec`. Not a mode of the official sampler; its rules per step are.

        Blocks of a block model are counted from the first token, and a mask sees nothing behind its block
        (`jdllm.serving.blocks.infill.block_infill_spec`).

        Arguments:
        - `texts`: the mask token of the tokenizer stands for each missing token; this special token is
          parsed in any case.
        - `sampling_params`, or `sampling`: for all texts, or one for each; by default `default_sampling()`
          without `steps` and `block_length`.
        - `token_ids`: ids instead of texts, one list for each sequence.
        - `on_step`: called with a `StepUpdate` after each step of each request, as it happens.
        - `parse_special`: special tokens in the texts become their ids; otherwise they are plain text.
        - `progress`: show a progress bar, if standard error is a terminal.

        Returns one output for each sequence, whose `token_ids` and `text` are the whole sequence.
        """
        given = read_prompts(
            texts,
            token_ids,
            functools.partial(self._encode, parse_special=parse_special, parsed=self._mask_token()),
            ("texts", "token_ids"),
        )
        # The checkpoint's own steps and blocks are for its `gen_length`, not for the masks of this text.
        default = self.default_sampling().changed(steps=None, block_length=None)
        asked = _given_once(sampling_params, sampling, default)
        return self._answer(self.infill_spec, given, asked, on_step, progress)

    def chat_prompt(self, messages: Conversation) -> str:
        """Render messages (or one user message) with the model's chat template.

        `generate` needs `parse_special=True` for the text, and then takes special tokens in the messages for
        real ones: prefer `chat`.
        """
        (conversation,) = read_conversations(messages)
        return self._needs_tokenizer("a chat template").apply_chat_template(conversation)

    def _encode(
        self, text: str, *, parse_special: bool, parsed: Sequence[str] = (), begins: bool = True
    ) -> list[int]:
        tokenizer = self._needs_tokenizer("a text prompt")
        return tokenizer.encode(text, parse_special=parse_special, parsed=parsed, begins=begins)

    def _mask_token(self) -> list[str]:
        """The text of the mask token, if there is one."""
        if self.tokenizer is None or self.config.mask_id is None:
            return []
        token = self.tokenizer.token(self.config.mask_id)
        return [] if token is None else [token]

    def _needs_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs tokenizer files (tokenizer.json), which this model has not: use token ids"
            )
        return self.tokenizer

    def _answer(
        self,
        make: Callable[..., RequestSpec],
        prompts: list[Prompt],
        sampling: Sampling,
        on_step: OnStep | None,
        progress: bool,
    ) -> list[RequestOutput]:
        if not (on_step is None or callable(on_step)):
            raise RequestError(f"on_step is {shortened(on_step)}, expected a function")
        asked = self._ask(make, prompts, sampling)
        outputs: dict[int, RequestOutput] = {}
        updates: Updates = "every" if on_step is not None else "later" if progress else "none"
        with shown(sum(len(one.specs) for one in asked), progress) as show:
            for prompt, update in self._run(asked, updates=updates, show=show):
                if isinstance(update, RequestOutput):
                    outputs[prompt] = update
                elif on_step is not None:
                    on_step(update)
        return [outputs[i] for i in range(len(asked))]

    def _run(
        self, asked: list[AskedPrompt], *, updates: Updates, show: Callable[[Update], None] = lambda _: None
    ) -> Iterator[tuple[int, StepUpdate | RequestOutput]]:
        """Updates of all requests and the outputs of finished prompts, each with the index of its prompt."""
        specs = [(prompt, spec) for prompt, one in enumerate(asked) for spec in one.specs]
        ended: dict[int, dict[int, Request]] = {prompt: {} for prompt, _ in specs}
        for update in self.engine.run([spec for _, spec in specs], updates=updates):
            show(update)
            prompt = specs[update.request][0]
            if isinstance(update, StepUpdate):
                yield prompt, update
                continue
            if isinstance(update.error, NonFiniteError):
                raise NonFiniteError(f"request {update.request}: {update.error}") from None
            if update.error is not None:
                raise update.error
            ended[prompt][update.request] = update.state
            one, samples = asked[prompt], ended[prompt]
            if len(samples) == len(one.specs):
                requests = [samples[i] for i in sorted(samples)]
                yield prompt, request_output(one.text, one.seed, requests, self._decode)

    def _ask(
        self, make: Callable[..., RequestSpec], prompts: list[Prompt], sampling: Sampling
    ) -> list[AskedPrompt]:
        each = sampling_for_each(sampling, len(prompts))
        if self.engine.scheduler.limits.in_step:
            each = self.engine.between_parts(functools.partial(same_on_all, prompts, each))
        asked = ask(prompts, each, make)
        self._warn_of_length(specs_of(asked))
        return asked

    @functools.cached_property
    def _grammars(self) -> Grammars:
        """The forms of answers that were asked for."""
        return Grammars(self._needs_tokenizer("structure"), self.config)

    @property
    def _decode(self) -> Decode | None:
        return None if self.tokenizer is None else self.tokenizer.decode

    def spec(self, prompt: TokenIds | LongContext, sampling: SamplingParams) -> RequestSpec:
        """What `generate` asks of the engine for one sample.

        Arguments:
        - `prompt`: ids, or the ids of a question over a long context.

        Raises `RequestError` as `generate` does.
        """
        bos_id = None if self.tokenizer is None else self.tokenizer.bos_id
        sampling = self._spelled(sampling)
        if not isinstance(prompt, LongContext):
            spec = mode_of(self.config).spec(prompt, sampling, self.config, self._decode, bos_id)
            structure = sampling.structure
            return spec if structure is None else replace(spec, grammar=self._grammars.compiled(structure))
        return long_spec(prompt, sampling, self.config, bos_id, decode=self._decode)

    def infill_spec(self, token_ids: TokenIds, sampling: SamplingParams) -> RequestSpec:
        """What `infill` asks of the engine for one sample.

        Arguments:
        - `token_ids`: ids with masks.

        Raises `RequestError` as `infill` does.
        """
        return mode_of(self.config).infilling(token_ids, self._spelled(sampling), self.config)

    def _spelled(self, sampling: SamplingParams) -> SamplingParams:
        """The same with ids in place of the texts of bad words; unchanged without a tokenizer."""
        tokenizer = self.tokenizer
        if tokenizer is None or not sampling.bad_words:
            return sampling
        return spelled(sampling, lambda word: tokenizer.encode(word, begins=False), tokenizer.decode)

    def _warn_of_length(self, specs: list[RequestSpec]) -> None:
        longest = max((spec.positions for spec in specs), default=0)
        limit = self.config.rope.effective_context(self.config.max_positions)
        if longest > limit:
            warnings.warn(
                f"a sequence of {longest} tokens is longer than the {limit} positions of the model:"
                " quality beyond them is not assured",
                skip_file_prefixes=(str(Path(__file__).parent),),
            )


def _given_once(
    sampling_params: Sampling | None, sampling: Sampling | None, default: SamplingParams
) -> Sampling:
    """The value that was given under one of two names, or the default."""
    if sampling_params is not None and sampling is not None:
        raise RequestError("sampling and sampling_params are one and the same: give either")
    return next((given for given in (sampling_params, sampling) if given is not None), default)
