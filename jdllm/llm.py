"""`LLM`: a model from a checkpoint directory to text."""

import functools

from jdllm.compiling.executables import Executables, Prepared
from jdllm.declarations import takes
from jdllm.decoding.prefilling import Prefilling, Preset
from jdllm.decoding.sampling import SamplingParams
from jdllm.distributed import leads
from jdllm.engine_options import EngineOptions
from jdllm.errors import ConfigError
from jdllm.generates_text import GeneratesText
from jdllm.progress import warming
from jdllm.prompts import AskedPrompt
from jdllm.running_model import Resident, start
from jdllm.scores_text import ScoresText
from jdllm.scoring import Scorer
from jdllm.serving.engine import Engine
from jdllm.serving.long.request import long_spec
from jdllm.serving.long.warm_question import ANSWER, warm_questions
from jdllm.serving.spec import RequestSpec
from jdllm.serving.trace import Trace


class LLM(GeneratesText, ScoresText):
    """A language model, one that denoises or a causal one, ready to generate and score, and to infill.

    The arguments are the fields of `jdllm.engine_options.EngineOptions`.

    Raises `ConfigError` or `CheckpointError` for a model that cannot be run or read, and for a verifier that
    is not causal or has another tokenizer, and `MemoryBudgetError` where `memory` has no room for it beside
    what others hold. A call whose step does not fit `memory` raises it before anything of that step has run.

    Several threads may call one `LLM`: their requests run together. `close`, or leaving a `with` block, frees
    the KV pool and the weights.
    """

    @takes(EngineOptions)
    def __init__(self, options: EngineOptions):
        trace = Trace(options.trace) if options.trace is not None and leads() else None
        try:
            model = start(options)
        except BaseException:
            if trace is not None:
                trace.discard()
            raise
        model.parts.engine.trace = trace
        self.config, self.tokenizer = model.config, model.tokenizer
        self.account = model.account
        self._default_sampling = model.default_sampling
        self._executables = model.executables
        self._description = model.description
        self._parts: Resident | None = model.parts
        if options.warmup:
            self.warmup(options.progress)

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
        """The executables, with counts of compiled and of loaded ones."""
        return self._executables

    @property
    def scorer(self) -> Scorer:
        """What evaluates given texts; raises `ConfigError` once it is closed."""
        return self._open.scorer

    @property
    def _open(self) -> Resident:
        if self._parts is None:
            raise ConfigError("this LLM is closed: make another one")
        return self._parts

    def __repr__(self) -> str:
        return f"LLM({self._description})"

    def warmup(self, progress: bool = True, prefilling: Prefilling | Preset | None = None) -> Prepared:
        """Compile or load the executables of `LLM(warmup=True)`; returns how many there were.

        These run the steps of all requests of up to `max_num_batched_tokens` rows, and score given text.
        Other executables are compiled when first needed: longer sequences, controls of logits, a repetition
        penalty of causal models and their prompts that run layer by layer, and stages of long contexts
        without `prefilling`.

        Arguments:
        - `progress`: show a progress bar. If standard error is no terminal, a line appears every 10 s.
        - `prefilling`: the stages of questions over long contexts too, with these settings or those of a
          preset: questions of random ids are asked. Instructions of more than 128 tokens and queries of more
          than 64 may still compile something.

        Raises `RequestError` where the model has no long contexts, and `MemoryBudgetError` where a stage does
        not fit.
        """
        questions = [] if prefilling is None else self._questions(prefilling)
        warmed = [self.engine, self.scorer]
        programs = [program for one in warmed for program in one.programs()]

        def rest() -> None:
            for one in warmed:
                one.warm()
            for question in questions:
                for _ in self._run([AskedPrompt(None, 0, [question])], updates="none"):
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
