"""The form in which a device keeps the matrices of a checkpoint where nobody asks for another one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jdllm.checkpoints.index import Index
from jdllm.checkpoints.loading import read_index
from jdllm.checkpoints.merging import merged
from jdllm.checkpoints.quantised.packed import PackedTensor
from jdllm.errors import ConfigError
from jdllm.gguf_files import is_gguf
from jdllm.models.config import ModelConfig
from jdllm.models.quantization import KEYS, quantization_of, stored_form
from jdllm.models.weights import is_spec, spec_tree
from jdllm.quantised import KINDS, WeightForm


class DefaultForm(NamedTuple):
    """The forms of the matrices of layers, as `ModelConfig.quantised` takes them.

    - `form`: of all leaves, or of those that are not `in_int8`; `None` for the type of all other weights.
    - `in_int8`: leaves some of whose matrices a GGUF file stores in 5, 6 or 8 bits.
    """

    form: WeightForm | None
    in_int8: tuple[str, ...] = ()


def default_form(
    path: Path, config: ModelConfig, values: Mapping[str, Any], adapter: Path | None = None
) -> DefaultForm:
    """The form of the matrices of layers, by what is stored of them.

    Arguments:
    - `path`: the directory of the checkpoint, or a GGUF file.
    - `config`: the model, not quantised.
    - `values`: of its `config.json`, with those that replace some.
    - `adapter`: a directory of PEFT whose LoRA is merged into the tensors.

    Returns the form of a native checkpoint. Of another one the form in which each of these matrices is
    stored, if no adapter changes them and the model can run so. In a GGUF file some may be in 5, 6 or 8 bits
    beside others in 4: their leaves are rounded to int8.

    Raises what `read_index`, `merged` and `quantization_of` raise.
    """
    found = quantization_of(values, "config.json")
    in_blocks = is_gguf(path) and not any(key in values for key in KEYS)
    if not in_blocks and (found is None or found.method == "jdllm"):
        return DefaultForm(stored_form(values))
    index = read_index(path)
    if adapter is not None:
        index = merged(index, adapter, config)
    for form in KINDS:
        in_int8 = _in_int8(index, config, form)
        if in_int8 is not None:
            return DefaultForm(form, in_int8)
    return DefaultForm(None)


def _in_int8(index: Index, config: ModelConfig, form: WeightForm) -> tuple[str, ...] | None:
    """The leaves that have to be in int8 where all others are stored in numbers of this form. `None` where
    that cannot be, and where no leaf is stored so."""
    try:
        specs = jax.tree.leaves_with_path(spec_tree(config.quantised(form)), is_leaf=is_spec)
    except ConfigError:
        return None
    whole: dict[str, bool] = {}
    for (*_, key), spec in specs:
        stored = [index.get(name) for name, _ in spec.sources()] if spec.quantised else []
        for one in stored:
            same = one is not None and one.numbers_in(form) is not None
            if not same and not (isinstance(one, PackedTensor) and one.may_round):
                return None
            whole[key.key] = same and whole.get(key.key, True)
    return tuple(name for name, same in whole.items() if not same) if any(whole.values()) else None
