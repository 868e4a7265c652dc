"""A model as `LLM` holds it: read from a checkpoint, its weights where they fit."""

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jdllm.checkpoints.adapters import load_adapter
from jdllm.checkpoints.default_form import DefaultForm, default_form
from jdllm.checkpoints.loading import load_params, resolve, resolve_dtype
from jdllm.checkpoints.tokenizer import Tokenizer, complete_ids, load_tokenizer
from jdllm.decoding.generation_defaults import default_sampling
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import ConfigError
from jdllm.execution.offload.placement import arriving_bytes, host_weight_bytes
from jdllm.models.adapter import DraftAdapter
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_checkpoint, read_config
from jdllm.models.leaf import dtypes_of
from jdllm.models.spread import adapter_in_parts, card_bytes, in_parts, weight_shardings
from jdllm.models.weights import HOST_LAYERS, Params, zero_params
from jdllm.quantised import WeightForm
from jdllm.stored_rows import KvCacheDtype


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model with its weights.

    - `config`, `tokenizer`, `default_sampling`: of the checkpoint; no tokenizer where it has none.
    - `params`: the weights, on the device but for `config.offloaded` layers.
    - `adapter`: with which the model drafts, `None` where the checkpoint has none or nobody wants it.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None = None
    default_sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    adapter: DraftAdapter | None = None

    @property
    def device_bytes(self) -> int:
        """Bytes of weights on the device, layers that arrive there included; on several cards on each."""
        here = {name: node for name, node in self.params.items() if name != HOST_LAYERS}
        config, dtype = self.config, dtypes_of(self.params).weights
        streamed = host_weight_bytes(config, dtype, config.offloaded)
        arriving = arriving_bytes(streamed, config.offloaded)
        return card_bytes(here) + arriving + (0 if self.adapter is None else self.adapter.bytes)


def load_model(
    model: str | Path,
    dtype: str,
    overrides: Mapping[str, Any],
    count_offloaded: Callable[[ModelConfig, str], int],
    keeps_whole: Callable[[ModelConfig, str], bool],
    *,
    load_weights: bool,
    progress: bool,
    adapter: Path | None = None,
    quantization: WeightForm | None = None,
    cards: int = 1,
    plain_drafts: bool = False,
    kv_cache_dtype: KvCacheDtype = "auto",
) -> LoadedModel:
    """Load a checkpoint onto the default device, with as many layers in host memory as it has no room for.

    Arguments:
    - `model`: a Hugging Face checkpoint directory or hub id, or a GGUF file.
    - `dtype`: of the weights; "auto" for the type of the checkpoint.
    - `overrides`: values that replace values of `config.json`.
    - `count_offloaded`: returns how many layers of a model in a dtype go to host memory.
    - `keeps_whole`: returns whether each of several cards gets all layers of a model in a dtype too.
    - `load_weights`: read the weights; `False` leaves them zero.
    - `progress`: show a progress bar.
    - `adapter`: a directory of PEFT whose LoRA is merged into the weights.
    - `quantization`: the form of the matrices of layers; `None` for that of the checkpoint.
    - `cards`: on how many devices its steps run. Each of them gets its part of the weights.
    - `plain_drafts`: leave an adapter for drafts where it is.
    - `kv_cache_dtype`: how keys and values are stored on the device.

    Raises `CheckpointError` and `ConfigError` as `LLM` does.
    """
    path = resolve(model)
    plain = dataclasses.replace(
        config_from_checkpoint(path, overrides), cards=cards, kv_cache_dtype=kv_cache_dtype
    )
    dtype = resolve_dtype(path, plain, dtype)
    values = {**read_config(path), **overrides}
    forms = DefaultForm(quantization)
    if quantization is None:
        forms = default_form(path, plain, values, adapter)
    config = plain.quantised(*forms)
    config = dataclasses.replace(config, offloaded=count_offloaded(config, dtype))
    whole_layers = keeps_whole(config, dtype)
    # The tokenizer's library takes longer to import than a small model to load.
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(load_tokenizer, path)
        params = _weights(path, config, dtype, load_weights, progress, adapter)
        params = in_parts(params, config, whole_layers=whole_layers)
        tokenizer = reading.result()
    if tokenizer is not None:
        config = complete_ids(config, tokenizer, overrides)
        config = dataclasses.replace(config, token_limit=len(tokenizer))
    drafts = None
    if not plain_drafts and not config.offloaded:
        read = load_adapter(path, config, dtype, load_weights=load_weights)
        drafts = None if read is None else adapter_in_parts(read, config)
    sampling = default_sampling(path, causal=config.in_order)
    return LoadedModel(config, params, tokenizer, sampling, drafts)


def _weights(
    path: Path,
    config: ModelConfig,
    dtype: str,
    load_weights: bool,
    progress: bool,
    adapter: Path | None,
) -> Params:
    """The weights as they are read, where the model has them."""
    placed = weight_shardings(config)
    if load_weights:
        return load_params(path, config, dtype, progress=progress, sharding=placed, adapter=adapter)
    if config.offloaded:
        raise ConfigError(
            f"load_weights is False, which is for a model on its device, and {config.offloaded} layers would"
            " be in host memory: raise memory"
        )
    return zero_params(config, dtype, placed)
