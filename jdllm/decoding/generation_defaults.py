"""Sampling parameters that a checkpoint itself asks for."""

from pathlib import Path

from jdllm.decoding.causal_sampling import PENALTIES, check_causal
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.sampling_checks import FILTERS, is_drawn, without_effect
from jdllm.decoding.sampling_options import parameter_names
from jdllm.errors import CheckpointError, RequestError
from jdllm.json_files import read_object
from jdllm.models.hf_config import GENERATION_CONFIG

_PUBLISHED = ("eps", "alg_temp")
"""Fields that published files carry whether or not the sampler that they name uses them; filters are too."""


def default_sampling(directory: str | Path, *, causal: bool = False) -> SamplingParams:
    """The sampling parameters of a checkpoint's `generation_config.json`.

    The file may name every field of `SamplingParams`, and Hugging Face's `max_new_tokens` and `do_sample`:
    false stands for temperature 0. A null is a key that is left out; `top_k` 0 or -1 filters nothing, as
    there and in vLLM. Filters, `eps` and `alg_temp` that the sampler does not use are passed over, and so are
    keys that jdllm does not know. `max_length` is among these: it counts the prompt, too.

    Without `do_sample` a causal model is greedy and any other takes the temperature that is stated; with it
    a causal model's temperature is 1 where none is. Penalties are passed over unless the model is causal. A
    `top_k` that is not stated filters nothing, where transformers would keep 50 ids.

    Arguments:
    - `directory`: of the checkpoint. Without the file the defaults of `SamplingParams` hold.
    - `causal`: whether the model generates one token after another.

    Raises `CheckpointError`, naming file and key, where the file is no JSON object, a value is not allowed or
    a causal model is to denoise.
    """
    path = Path(directory) / GENERATION_CONFIG
    if not path.is_file():
        return SamplingParams()
    own = parameter_names(SamplingParams)
    stated = {key: value for key, value in read_object(path).items() if value is not None}
    fields = {key: value for key, value in stated.items() if key in own}
    if "max_new_tokens" in stated:
        fields.setdefault("gen_length", stated["max_new_tokens"])
    if not causal:
        fields = {name: value for name, value in fields.items() if name not in PENALTIES}
    sample = stated.get("do_sample", not causal)
    if not isinstance(sample, bool):
        raise CheckpointError(f"{path}: do_sample is {sample!r}, expected true or false")
    if not sample:
        fields["temperature"] = 0.0
    elif causal:
        fields.setdefault("temperature", 1.0)
    together = dict(vars(SamplingParams())) | fields
    idle = [name for name in without_effect(together) if name in _PUBLISHED]
    if not is_drawn(together):
        idle += FILTERS
    fields = {name: value for name, value in fields.items() if name not in idle}
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
