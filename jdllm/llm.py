"""`LLM`: a model from a checkpoint directory to text."""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jdllm.arguments import check_types, positive, shortened
from jdllm.checkpoints.conversation import Rendering
from jdllm.checkpoints.token_text import Decode
from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.chunks import ChunkConfig
from jdllm.compiling import store as executable_store
from jdllm.compiling.executables import Executables, Prepared
from jdllm.compiling.store import ExecutableStore
from jdllm.decoding.prefilling import Prefilling, Preset
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import ConfigError, NonFiniteError, RequestError
from jdllm.loaded_model import LoadedModel, load_model
from jdllm.models.config import ModelConfig
from jdllm.models.leaf import device_of, dtypes_of
from jdllm.models.weights import tree_bytes
from jdllm.outputs import RequestOutput, request_output
from jdllm.pallas.device import preferring, target
from jdllm.planning.account import make_account
from jdllm.planning.budget import DEFAULT_HOST_MEMORY, device_budget, parse_bytes, usable_host_memory
from jdllm.planning.ladder import DEFAULT_ROWS
from jdllm.planning.offloading import account_with_offloading
from jdllm.progress import shown, warming
from jdllm.prompts import (
    Asked,
    Conversation,
    Prompt,
    PromptLike,
    TokenIds,
    ask,
    naming_prompt,
    read_conversation,
    read_conversations,
    read_prompts,
    sampling_for_each,
    specs_of,
)
from jdllm.scores_text import ScoresText
from jdllm.scoring import Scorer
from jdllm.serving.adaptive.verifier import Verifier, load_verifier
from jdllm.serving.adaptive.verifier_keys import verifier_keys_bytes
from jdllm.serving.build import make_engine
from jdllm.serving.engine import Engine, Updates
from jdllm.serving.long.request import LongContext, long_spec
from jdllm.serving.long.warm_question import ANSWER, warm_questions
from jdllm.serving.modes.registry import mode_of
from jdllm.serving.request import Request
from jdllm.serving.spec import RequestSpec, infill_spec
from jdllm.serving.updates import StepUpdate, Update

if TYPE_CHECKING:
    from jdllm.execution.module import Transformer

Sampling = SamplingParams | Iterable[SamplingParams]
OnStep = Callable[[StepUpdate], None]


class _Parts(NamedTuple):
    """What of an `LLM` holds memory of the device."""

    engine: Engine
    scorer: Scorer


class LLM(ScoresText):
    """A language model, one that denoises or a causal one, ready to generate and score, and to infill.

    Arguments:
    - `model`: a Hugging Face checkpoint directory or hub id, or a `Transformer` that is already in memory.
    - `dtype`: "float32", "bfloat16", "float16", or "auto" for that of the checkpoint. Results equal the
      official sampler's token by token in float32 at temperature 0.
    - `load_weights`: `False` leaves the weights of a checkpoint zero, unread: enough for warming up what
      another process then finds in `cache_dir`.
    - `max_num_batched_tokens`: packed rows of one step over all requests; a longer request runs alone. By
      default as many as leave the KV pool 85 % of what `memory` has room for (8192 to 36864, see
      `jdllm.planning.account.make_account`), and 8192 with a `verifier`, for a causal model, and on a CPU
      without `memory`. `account.rows` says how many.
    - `max_num_logits`: masked rows whose logits may exist at a time; by default as many as fit, and 512 on a
      CPU without `memory`.
    - `memory`: what the device may hold in all, weights and CUDA context included, in bytes or as "24GiB"; by
      default everything that XLA may allot. Every step is planned and compiled within it before it runs.
    - `host_memory`: pinned host memory that may be used where the device is too small for the weights or a
      step; "0" for none. Of weights as many layers as fit stay on the device, and the others come there in
      every step; there is no KV pool then, and no `score` or `logits`.
    - `max_context`: the longest sequence that runs beside the KV pool, with a cache too where the pool then
      still holds a quarter of it; by default one of a step's rows. A
      longer one without a cache runs while no request with a cache does: the pool makes room for it.
    - `kv_pool`: bytes of the KV pool, or "8GiB"; by default what `memory` leaves beside weights and the
      largest step, and 1 GiB on a CPU without `memory`.
    - `chunks`: fixed chunk counts for every step, instead of planned ones.
    - `hf_overrides`: values that replace those of `config.json`, such as `{"eos_token_id": 7}`.
    - `verifier`: an autoregressive model (Qwen2 for Dream) for `SamplingParams(transfer="adaptive")`: its
      checkpoint directory or hub id, loaded in the dtype of the model, or a `Transformer`. Its weights stay
      on the device beside the model's and count against `memory`. It must have the model's tokenizer; either
      may define further ids after the common ones.
    - `verifier_shares_ids`: where not both tokenizers are known (token ids only, or a `Transformer`), take
      vocabularies of different sizes to agree up to the end of the smaller one.
    - `warmup`: compile all that requests of up to `max_num_batched_tokens` rows may need (without a cache:
      up to 8192 or more), now and not when they ask for it.
    - `cache_dir`: where executables are kept for the next process, which need not compile them; a directory
      that is the user's alone (mode 0700), made where there is none. "auto" is `~/.cache/jdllm/executables`,
      or below `XDG_CACHE_HOME`; where nothing can be kept there, it is a warning. `None` keeps nothing.
    - `kernels`: "auto" for those that suit the card, "triton" for those in Triton only (cards from Ampere
      on), or "xla" for none.
    - `progress`: show a progress bar while loading and warming up where standard error is a terminal, and a
      line every 10 s where it is none.

    Raises `ConfigError` or `CheckpointError` for a model that cannot be run or read, and for a verifier that
    is not causal or has another tokenizer, and `MemoryBudgetError` where `memory` has no room for it beside
    what others hold. A call whose step does not fit `memory` raises it before anything of that step has run.

    Several threads may call one `LLM`: their requests run together. `close`, or leaving a `with` block, frees
    the KV pool and the weights.
    """

    def __init__(
        self,
        model: "str | Path | Transformer",
        *,
        dtype: str = "auto",
        load_weights: bool = True,
        max_num_batched_tokens: int | None = None,
        max_num_logits: int | None = None,
        memory: int | str | None = None,
        host_memory: int | str = DEFAULT_HOST_MEMORY,
        max_context: int | None = None,
        kv_pool: int | str | None = None,
        chunks: ChunkConfig | None = None,
        hf_overrides: Mapping[str, Any] | None = None,
        verifier: "str | Path | Transformer | None" = None,
        verifier_shares_ids: bool = False,
        warmup: bool = False,
        cache_dir: str | Path | None = "auto",
        kernels: str = "auto",
        progress: bool = True,
    ):
        if max_num_batched_tokens is not None:
            max_num_batched_tokens = positive("max_num_batched_tokens", max_num_batched_tokens, ConfigError)
        elif verifier is not None:
            max_num_batched_tokens = DEFAULT_ROWS[0]
        if max_num_logits is not None:
            max_num_logits = positive("max_num_logits", max_num_logits, ConfigError)
        models = _model_types(model, verifier)
        check_types(
            model=(model, models),
            dtype=(dtype, str),
            load_weights=(load_weights, bool),
            chunks=(chunks, ChunkConfig | None),
            hf_overrides=(hf_overrides, Mapping | None),
            verifier=(verifier, models | None),
            verifier_shares_ids=(verifier_shares_ids, bool),
            warmup=(warmup, bool),
            cache_dir=(cache_dir, str | Path | None),
            kernels=(kernels, str),
            progress=(progress, bool),
        )
        sizes = {
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_logits": max_num_logits,
            "max_context": max_context,
            "kv_pool": None if kv_pool is None else parse_bytes(kv_pool, "kv_pool"),
        }

        host_memory = usable_host_memory(jax.devices()[0], host_memory)
        with preferring(kernels):
            runs_on = target()
        runs_on.check_card()

        def count_offloaded(config: ModelConfig, dtype: str) -> int:
            device = jax.devices()[0]
            budget = device_budget(device, memory, host_memory, held=0)
            if budget is None or verifier is not None:
                return 0
            return account_with_offloading(config, dtype, budget, device=runs_on, **sizes).offloaded

        if isinstance(model, str | Path):
            overrides = hf_overrides or {}
            loaded = load_model(
                model, dtype, overrides, count_offloaded, load_weights=load_weights, progress=progress
            )
        elif dtype != "auto" or hf_overrides or not load_weights:
            raise ConfigError(
                "dtype, hf_overrides and load_weights are for checkpoints: a Transformer has its own"
            )
        else:
            loaded = LoadedModel(model.config, model.params())
        self.config, self.tokenizer = loaded.config, loaded.tokenizer
        self._default_sampling = loaded.default_sampling
        params, offloaded = loaded.params, loaded.offloaded
        device, dtype = device_of(params), dtypes_of(params).activations.name
        self._executables = executables = Executables(
            device.platform, _store(cache_dir), kernels=runs_on.kernels
        )
        beside = None if verifier is None else self._verifier(verifier, dtype, verifier_shares_ids, progress)
        verifier_bytes = 0 if beside is None else tree_bytes(beside.params)
        held = loaded.device_bytes + verifier_bytes
        if beside is not None:
            verifier_bytes += verifier_keys_bytes(beside, max_num_batched_tokens or DEFAULT_ROWS[0])
        self._budget = device_budget(device, memory, host_memory, held=held)
        self.account = make_account(
            self.config,
            dtype,
            self._budget,
            device=executables.target,
            verifier_bytes=verifier_bytes,
            weights_bytes=None if offloaded else loaded.device_bytes,
            offloaded=0 if offloaded is None else offloaded.count,
            **sizes,
        )
        engine = make_engine(
            params,
            self.config,
            executables,
            self.account,
            chunks=chunks,
            max_num_logits=max_num_logits,
            verifier=beside,
            eager_pool=device.platform != "cpu" and offloaded is None,
            offloaded=offloaded,
        )
        scorer = Scorer(
            params, self.config, executables, self.account, engine.between_parts, max_num_logits or 512
        )
        self._parts: _Parts | None = _Parts(engine, scorer)
        if warmup:
            self.warmup(progress)
        self._device = device
        weights = params if offloaded is None else offloaded.all
        self._weights = [(leaf.dtype.name, leaf.size, leaf.nbytes) for leaf in jax.tree.leaves(weights)]

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the device: what runs ends, and nothing can be asked afterwards."""
        if self._parts is not None:
            self._parts.engine.close()
            self._parts = None

    @property
    def engine(self) -> Engine:
        """What runs the requests of this model; raises `ConfigError` once it is closed."""
        return self._open.engine

    @property
    def executables(self) -> Executables:
        """What is compiled, with counts of what was compiled and what was loaded."""
        return self._executables

    @property
    def _scorer(self) -> Scorer:
        if self.account.offloaded:
            raise ConfigError(
                "score and logits need all weights on the device, and those of"
                f" {self.account.offloaded} layers are in host memory: raise memory"
            )
        return self._open.scorer

    @property
    def _open(self) -> _Parts:
        if self._parts is None:
            raise ConfigError("this LLM is closed: make another one")
        return self._parts

    def __repr__(self) -> str:
        parameters = sum(size for _, size, _ in self._weights)
        gib = sum(nbytes for _, _, nbytes in self._weights) / 2**30
        dtype = max(self._weights, key=lambda leaf: leaf[1])[0]
        memory = f"{gib:.2f} GiB of weights"
        if self._budget is not None:
            memory += f" in {self._budget.device / 2**30:.2f} GiB"
        return (
            f"LLM({self.config.family}, {parameters / 1e9:.3g}B parameters, {dtype},"
            f" {self._device.device_kind}, {memory})"
        )

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

        Arguments and errors: as of `generate`, before anything has run.

        Yields a `StepUpdate` after each step of each request, and the output of a prompt as soon as its
        samples are finished. Leaving the iteration ends what is left.
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
        - `add_generation_prompt`, `continue_final_message`, `chat_template_kwargs`: as of `Rendering`.
        - others: as for `generate`.

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
            with naming_prompt(i, len(conversations)):
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

        Arguments as for `generate`; a text holds the tokenizer's mask token where something is missing, the
        one special token that is parsed in any case. Of `default_sampling()` all but `steps` and
        `block_length` apply.

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
        return self._answer(
            lambda ids, one: infill_spec(ids, one, self.config), given, asked, on_step, progress
        )

    def warmup(self, progress: bool = True, prefilling: Prefilling | Preset | None = None) -> Prepared:
        """Compile or load what `LLM(warmup=True)` does; says how many executables that were.

        Steps of all requests of up to `max_num_batched_tokens` rows, and evaluations that score given text.
        What is left is compiled when first needed: longer sequences, a repetition penalty of causal models
        and their prompts that run layer by layer, and stages of long contexts without `prefilling`.

        Arguments:
        - `progress`: as of `LLM`.
        - `prefilling`: the stages of questions over long contexts too, with these settings or those of a
          preset: questions of random ids are asked. Instructions of more than 128 tokens and queries of more
          than 64 may still compile something.

        Raises `RequestError` where the model has no long contexts, and `MemoryBudgetError` where a stage does
        not fit.
        """
        questions = [] if prefilling is None else self._questions(prefilling)
        # Scores need all weights on the device.
        warmed = [self.engine, *([] if self.account.offloaded else [self._scorer])]
        programs = [program for one in warmed for program in one.programs()]

        def rest() -> None:
            for one in warmed:
                one.warm()
            for question in questions:
                for _ in self._run([Asked(None, 0, [question])], updates="none"):
                    pass

        with warming(len(programs), progress) as take:
            return self._executables.prepare(programs, take, rest)

    def _questions(self, prefilling: Prefilling | Preset) -> list[RequestSpec]:
        sampling = SamplingParams(
            gen_length=ANSWER,
            block_length=ANSWER,
            early_stop=False,
            prefilling=prefilling,  # pyright: ignore[reportArgumentType]
        )
        bos_id = None if self.tokenizer is None else self.tokenizer.bos_id
        make = functools.partial(long_spec, sampling=sampling, config=self.config, bos_id=bos_id)
        return list(warm_questions(make, self.config, self.account.prepare_rows))

    def default_sampling(self) -> SamplingParams:
        """What applies where a call gives no sampling parameters: what the checkpoint's
        `generation_config.json` says, and otherwise the defaults of `SamplingParams`."""
        return self._default_sampling

    def chat_prompt(self, messages: Conversation) -> str:
        """Render messages (or one user message) with the model's chat template.

        `generate` needs `parse_special=True` for the text, and then takes special tokens in the messages for
        real ones: prefer `chat`.
        """
        (conversation,) = read_conversations(messages)
        return self._needs_tokenizer("a chat template").apply_chat_template(conversation)

    def _verifier(
        self, source: "str | Path | Transformer", dtype: str, shares_ids: bool, progress: bool
    ) -> Verifier:
        return load_verifier(
            source, self.config, self.tokenizer, dtype, shares_ids=shares_ids, progress=progress
        )

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
        self, asked: list[Asked], *, updates: Updates, show: Callable[[Update], None] = lambda _: None
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
    ) -> list[Asked]:
        each = sampling_for_each(sampling, len(prompts))
        asked = ask(prompts, each, make)
        self._warn_of_length(specs_of(asked))
        return asked

    @property
    def _decode(self) -> Decode | None:
        return None if self.tokenizer is None else self.tokenizer.decode

    def spec(self, prompt: TokenIds | LongContext, sampling: SamplingParams) -> RequestSpec:
        """What `generate` asks of the engine for one sample.

        Arguments:
        - `prompt`: ids, or those of a question over a long context.

        Raises `RequestError` as `generate` does.
        """
        bos_id = None if self.tokenizer is None else self.tokenizer.bos_id
        if not isinstance(prompt, LongContext):
            return mode_of(self.config).spec(prompt, sampling, self.config, self._decode, bos_id)
        return long_spec(prompt, sampling, self.config, bos_id, decode=self._decode)

    def _warn_of_length(self, specs: list[RequestSpec]) -> None:
        longest = max((spec.positions for spec in specs), default=0)
        limit = self.config.rope.effective_context(self.config.max_positions)
        if longest > limit:
            warnings.warn(
                f"a sequence of {longest} tokens is longer than the {limit} positions of the model:"
                " quality beyond them is not assured",
                skip_file_prefixes=(str(Path(__file__).parent),),
            )


def _store(cache_dir: str | Path | None) -> ExecutableStore | None:
    if cache_dir == "auto":
        return executable_store.default_store()
    return None if cache_dir is None else ExecutableStore(Path(cache_dir))


def _model_types(model: Any, verifier: Any) -> Any:
    """The types that a model may have. Flax takes long to import: paths do without it."""
    if isinstance(model, str | Path) and isinstance(verifier, str | Path | None):
        return str | Path
    from jdllm.execution.module import Transformer

    return str | Path | Transformer


def _given_once(
    sampling_params: Sampling | None, sampling: Sampling | None, default: SamplingParams
) -> Sampling:
    """What was given under one of two names, or the default."""
    if sampling_params is not None and sampling is not None:
        raise RequestError("sampling and sampling_params are one and the same: give either")
    return next((given for given in (sampling_params, sampling) if given is not None), default)
