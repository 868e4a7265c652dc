"""The form in which a device keeps the matrices of a checkpoint where nobody asks for another one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jdllm.checkpoints.index import Index
from jdllm.checkpoints.loading import read_index
from jdllm.checkpoints.merging import merged
from jdllm.errors import ConfigError
from jdllm.models.config import ModelConfig
from jdllm.models.quantization import quantization_of, stored_form
from jdllm.models.weights import is_spec, spec_tree
from jdllm.quantised import KINDS, WeightForm


def default_form(
    path: Path, config: ModelConfig, values: Mapping[str, Any], adapter: Path | None = None
) -> WeightForm | None:
    """The form of the matrices of layers, by what is stored of them.

    Arguments:
    - `path`: the directory of the checkpoint, or a GGUF file.
    - `config`: the model, not quantised.
    - `values`: of its `config.json`, with those that replace some.
    - `adapter`: a directory of PEFT whose LoRA is merged into the tensors.

    Returns the form of a native checkpoint. Of another one the form in which each of these matrices is
    stored, if no adapter changes them and the model can run so. `None` is for matrices in the type of all
    other weights.

    Raises what `read_index`, `merged` and `quantization_of` raise.
    """
    found = quantization_of(values, "config.json")
    if found is None or found.method == "jdllm":
        return stored_form(values)
    index = read_index(path)
    if adapter is not None:
        index = merged(index, adapter, config)
    return next((form for form in KINDS if _has_all(index, config, form)), None)


def _has_all(index: Index, config: ModelConfig, form: WeightForm) -> bool:
    """Whether all matrices that a model keeps in this form are stored in numbers of this form."""
    try:
        specs = jax.tree.leaves(spec_tree(config.quantised(form)), is_leaf=is_spec)
    except ConfigError:
        return False
    names = (name for spec in specs if spec.quantised for name, _ in spec.sources())
    return all(name in index and index[name].numbers_in(form) is not None for name in names)
