"""What lm-eval asks for, in the terms of `LLM`: nothing here needs lm-eval."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jdllm.arguments import check_types, positive
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.sampling_options import parameter_names
from jdllm.engine_options import EngineOptions
from jdllm.errors import ConfigError, RequestError
from jdllm.noise import sample_seed

_DECIDED = {"model", "load_weights", "chunks", "progress"}
_OF_LLM = {f.name for f in dataclasses.fields(EngineOptions)} - _DECIDED
_ANSWERS = {"n", "logprobs", "return_history"}
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_FILTERS = ("top_p", "top_k", "min_p")
_OF_TASKS = {"temperature", "stop", "max_tokens"}

Encode = Callable[[str], list[int]]


class Pair(NamedTuple):
    """Ids before an answer, and the ids of the answer, whose log-likelihood is asked for."""

    prompt: list[int]
    answer: list[int]


@dataclasses.dataclass(frozen=True)
class ModelArguments:
    """What `--model_args` says, by whom it is for.

    - `of_llm`: arguments of `LLM`.
    - `sampling`: fields of `SamplingParams` that hold for every generation; `cfg_scale`, `seed` and
      `block_length` of a block model hold for likelihoods too.
    - `mc_num`, `mc_batch_size`: masked copies of an answer, and among how many of them the number of masks is
      stratified; not of causal models.
    - `is_check_greedy`: whether an answer is compared with the greedy one, which takes a forward evaluation a
      token unless the model is causal. Only some metrics ask for it; without, no answer counts as greedy.
    - `max_length`: positions of a sequence; `None` for as many as the model has.
    """

    of_llm: Mapping[str, Any]
    sampling: Mapping[str, Any]
    mc_num: int = 128
    mc_batch_size: int = 16
    is_check_greedy: bool = True
    max_length: int | None = None

    def __post_init__(self) -> None:
        for name in ("mc_num", "mc_batch_size"):
            positive(name, getattr(self, name), ConfigError)
        if self.max_length is not None:
            positive("max_length", self.max_length, ConfigError)
        check_types(is_check_greedy=(self.is_check_greedy, bool))


def read_model_arguments(given: Mapping[str, Any]) -> ModelArguments:
    """Sort the values of `--model_args`, without `pretrained`; `ConfigError` for unknown names."""
    own = {f.name for f in dataclasses.fields(ModelArguments)} - {"of_llm", "sampling"}
    fields = {*parameter_names(SamplingParams)} - _ANSWERS - _OF_TASKS
    for name in given:
        if name in _OF_TASKS:
            raise ConfigError(f"model_args has {name!r}: tasks ask for it too, so give it with --gen_kwargs")
        if name not in own | _OF_LLM | fields:
            known = ", ".join(sorted(own | _OF_LLM | fields | {"pretrained"}))
            raise ConfigError(f"model_args has {name!r}, expected some of {known}")
    of_llm, sampling, rest = (
        {name: value for name, value in given.items() if name in names} for names in (_OF_LLM, fields, own)
    )
    return ModelArguments(of_llm, sampling, **rest)


def request_sampling(
    default: SamplingParams, chosen: Mapping[str, Any], asked: Mapping[str, Any]
) -> SamplingParams:
    """The parameters of one generation.

    Arguments:
    - `default`: of the checkpoint.
    - `chosen`: fields that `--model_args` names.
    - `asked`: a task's generation arguments, updated by `--gen_kwargs`, which may name fields too.

    Where a `gen_length` is named it holds, and the length that a task asks for only cuts the answer.
    Otherwise the task's length is generated, in as many steps as tokens unless `steps` is named. Without
    `do_sample` a temperature above 0 samples; with it the temperature is 1 by default.

    Raises `RequestError` for other names, and as `SamplingParams` does.
    """
    given = dict(asked)
    lengths = [given.pop(name, None) for name in _LENGTHS]
    length = next((positive("max_gen_toks", x, RequestError) for x in lengths if x is not None), None)
    stop = [text for name in ("until", "stop") for text in _texts(given.pop(name, None)) if text]
    temperature = _temperature(given.pop("do_sample", None), given.pop("temperature", None))
    if not temperature:
        given = {name: value for name, value in given.items() if name not in _FILTERS}
    if given.get("num_beams") == 1:
        del given["num_beams"]
    unknown = sorted(set(given) - ({*parameter_names(SamplingParams)} - _ANSWERS))
    if unknown:
        raise RequestError(
            f"the generation arguments have {unknown[0]!r}, expected until, max_gen_toks, do_sample,"
            f" temperature or another of the sampling parameters"
        )
    fields = {**chosen, **given, "temperature": temperature, "stop": stop}
    if length is not None and "gen_length" in fields:
        fields["max_tokens"] = min(length, fields["gen_length"])
    elif length is not None:
        # The checkpoint's own steps are for its own length.
        fields = {"steps": None, **fields, "max_tokens": length}
    return default.changed(**fields)


def repeats_drawn_anew(contexts: Sequence[str], sampling: Sequence[SamplingParams]) -> list[SamplingParams]:
    """The parameters of each context, where what is asked again has another seed: repetition i draws what
    sample i of `n` would."""
    asked: Counter[tuple[str, SamplingParams]] = Counter()
    made = []
    for context, params in zip(contexts, sampling, strict=True):
        before = asked[context, params]
        asked[context, params] += 1
        if before and params.seed is not None:
            params = params.changed(seed=sample_seed(params.seed, before))
        made.append(params)
    return made


def encode_pair(encode: Encode, context: str, continuation: str) -> Pair:
    """Ids of a context and of what continues it.

    White space at the end of the context goes over to the continuation, and both are encoded together, so
    that tokens lie as they would in one text; where nothing is left of the continuation, apart. Of an empty
    context only those ids are left that the tokenizer puts before any text.
    """
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    prompt = encode(kept)
    answer = encode(kept + continuation)[len(prompt) :]
    return Pair(prompt, answer or encode(continuation)[len(encode("")) :])


def fitted(pair: Pair, max_length: int, *, least: int = 0) -> Pair:
    """`pair` without the beginning of its prompt where both are longer than `max_length`; of the prompt are
    left at least `least` ids."""
    room = max(max_length - len(pair.answer), least)
    return Pair(pair.prompt[max(len(pair.prompt) - room, 0) :], pair.answer)


def behind(first: int, answer: list[int]) -> Pair:
    """An answer without a context behind `first`, which it may begin with itself."""
    return Pair([first], answer[1:] if answer[:1] == [first] else answer)


def windows(ids: Sequence[int], max_length: int) -> list[Pair]:
    """A text in parts whose likelihoods multiply to its own.

    Each part has up to `max_length` tokens and is scored by itself, but for the last: it is scored after as
    many tokens before it as fit. A text that fits is one part, without a prompt.
    """
    starts = range(0, len(ids), max_length)
    parts = [Pair([], list(ids[start : start + max_length])) for start in starts]
    if len(parts) > 1:
        before = list(ids[len(ids) - max_length : starts[-1]])
        parts[-1] = Pair(before, parts[-1].answer)
    return parts


def rolling_windows(ids: Sequence[int], first: int, max_length: int) -> list[Pair]:
    """A text behind `first` in parts whose likelihoods multiply to its own, for a model that needs a token
    before what it scores.

    Each part has up to `max_length` tokens and is scored after the token before it, but for the last: it is
    scored after as many as fit. The last token of a part needs no position. Source:
    get_rolling_token_windows of lm-eval.
    """
    whole = [first, *ids]
    return [
        Pair(whole[max(stop - max_length, 0) : start + 1], list(ids[start:stop]))
        for start in range(0, len(ids), max_length)
        for stop in [min(start + max_length, len(ids))]
    ]


def _texts(given: object) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]


def _temperature(do_sample: object, temperature: object) -> Any:
    if do_sample is None:
        return 0.0 if temperature is None else temperature
    if not isinstance(do_sample, bool):
        raise RequestError(f"do_sample is {do_sample!r}, expected True or False")
    return 0.0 if not do_sample else 1.0 if temperature is None else temperature
