"""Sampling parameters that a checkpoint itself asks for."""

import dataclasses
from pathlib import Path
from typing import Any

from jdllm.decoding.causal_sampling import check_causal
from jdllm.decoding.sampling import SamplingParams, without_effect
from jdllm.errors import CheckpointError, RequestError
from jdllm.json_files import read_object
from jdllm.models.hf_config import GENERATION_CONFIG

_OWN = {field.name for field in dataclasses.fields(SamplingParams)}
_PUBLISHED = ("temperature", "top_p", "top_k", "min_p", "eps", "alg_temp")
"""Fields that published files carry whether or not the sampler that they name uses them."""


def default_sampling(directory: str | Path, *, causal: bool = False) -> SamplingParams:
    """The sampling parameters of a checkpoint's `generation_config.json`.

    The file may name every field of `SamplingParams`, and Hugging Face's `max_new_tokens` and `do_sample`:
    false stands for temperature 0. A null is a key that is left out; `top_k` 0 filters nothing, as there.
    Filters, `eps` and `alg_temp` that the sampler does not use are passed over, and so are keys that jdllm
    does not know. `max_length` is among these: it counts the prompt, too.

    Without `do_sample` a causal model is greedy and any other takes the temperature that is stated; with it
    a causal model's temperature is 1 where none is. `repetition_penalty` is passed over unless the model is
    causal. A `top_k` that is not stated filters nothing, where transformers would keep 50 ids.

    Arguments:
    - `directory`: of the checkpoint. Without the file the defaults are those of `SamplingParams`.
    - `causal`: whether the model generates one token after another.

    Raises `CheckpointError`, naming file and key, where the file is no JSON object, a value is not allowed or
    a causal model is to denoise.
    """
    path = Path(directory) / GENERATION_CONFIG
    if not path.is_file():
        return SamplingParams()
    stated = {key: value for key, value in read_object(path).items() if value is not None}
    fields = {key: value for key, value in stated.items() if key in _OWN}
    if "max_new_tokens" in stated:
        fields.setdefault("gen_length", stated["max_new_tokens"])
    if _is_off(stated.get("top_k")):
        del fields["top_k"]
    if not causal:
        fields.pop("repetition_penalty", None)
    sample = stated.get("do_sample", not causal)
    if not isinstance(sample, bool):
        raise CheckpointError(f"{path}: do_sample is {sample!r}, expected true or false")
    if not sample:
        fields["temperature"] = 0.0
    elif causal:
        fields.setdefault("temperature", 1.0)
    for name in without_effect(_defaults() | fields):
        if name in _PUBLISHED:
            del fields[name]
    try:
        sampling = SamplingParams(**fields)
        if causal:
            check_causal(sampling)
    except RequestError as error:
        message = str(error)
        if "gen_length" not in stated:
            message = message.replace("gen_length", "max_new_tokens")
        raise CheckpointError(f"{path}: {message}") from None
    return sampling


def _defaults() -> dict[str, Any]:
    return dataclasses.asdict(SamplingParams())


def _is_off(top_k: Any) -> bool:
    return type(top_k) is int and top_k == 0
