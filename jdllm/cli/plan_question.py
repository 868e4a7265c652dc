"""What `jdllm plan` is asked: a model by its configuration, a card, a budget and the sizes of an engine."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jdllm.byte_sizes import parse_bytes, parse_host_memory
from jdllm.cli.groups import OptionGroup
from jdllm.decoding.registry import cache_names
from jdllm.engine_options import check_devices
from jdllm.errors import CheckpointError, ConfigError
from jdllm.planning.descriptions import described_targets

if TYPE_CHECKING:
    from jdllm.models.config import ModelConfig
    from jdllm.planning.card import Card
    from jdllm.planning.plan import Workload
    from jdllm.planning.question import StepQuestion
    from jdllm.quantised import WeightForm

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Step(OptionGroup):
    """Which step is planned, and for which card."""

    context: Annotated[
        int | None,
        typer.Option(help="Tokens of the sequence, masks included.", show_default="the longest that fits"),
    ] = None
    mask_ratio: Annotated[float, typer.Option(help="Masked tokens per token.")] = 0.5
    target: Annotated[
        str | None,
        typer.Option(
            metavar="auto|CARD",
            help=f"The card that is here (auto), or one of {', '.join(described_targets())}.",
            show_default="the one that is here, or h200",
        ),
    ] = None
    cache_policy: Annotated[
        str,
        typer.Option(
            "--cache",
            "--cache-policy",
            metavar="|".join(cache_names()),
            help="What the KV pool keeps.",
        ),
    ] = "none"
    retention: Annotated[
        float | None,
        typer.Option(help="Share of the keys that a sparse policy keeps.", show_default="0.5"),
    ] = None
    host_tiers: Annotated[
        bool, typer.Option("--host-tiers/--no-host-tiers", help="Whether host memory may be used.")
    ] = True


def asked_of(given: Mapping[str, Any], config: Path, card: "Card", step: Step) -> "StepQuestion":
    """The question as options ask it."""
    from jdllm.models.spread import beside_bytes
    from jdllm.models.whole_layers import keeps_whole_layers
    from jdllm.planning.aot import device_of
    from jdllm.planning.budget import Budget
    from jdllm.planning.ladder import DEFAULT_ROWS
    from jdllm.planning.plan import Workload
    from jdllm.planning.question import StepQuestion
    from jdllm.planning.sharing import less

    memory, kv_pool = given["memory"], given["kv_pool"]
    host = parse_host_memory(given["host_memory"], "--host-memory")
    check_devices(given["devices"], given["host_memory"])
    if given["devices"] > 1:
        host = 0  # what is in host memory belongs to one card
    read = given["hf_overrides"], given["dtype"], given["devices"], given["quantization"]
    model, dtype = _model(config, *read)
    model = dataclasses.replace(model, kv_cache_dtype=given["kv_cache_dtype"])
    workload = Workload(
        model.on_card(),
        dtype,
        device_of(card.target, given["kernels"]),
        max_num_logits=given["max_num_logits"],
        mask_ratio=step.mask_ratio,
        cache_policy=step.cache_policy,
        retention=step.retention,
    )
    device = card.default_memory if memory is None else parse_bytes(memory, "--memory")
    whole_layers = keeps_whole_layers(given["whole_layers"], model, dtype, device)
    beside = beside_bytes(model, dtype, workload.device, whole_layers=whole_layers)
    budget = Budget(device, host=host if step.host_tiers else 0)
    rows = given["max_num_batched_tokens"]
    verifier = 0
    if given["verifier"] is not None:
        rows = rows or DEFAULT_ROWS[0]
        verifier = _verifier_bytes(given["verifier"], workload, rows)
    sizes = {
        "max_num_batched_tokens": rows,
        "max_context": given["max_context"],
        "kv_pool": None if kv_pool is None else parse_bytes(kv_pool, "--kv-pool"),
    }
    return StepQuestion(workload, card, less(budget, verifier + beside), step.context, sizes, verifier)


def _verifier_bytes(source: str, workload: "Workload", rows: int) -> int:
    """Bytes of a verifier beside steps of so many packed rows."""
    from jdllm.models.hf_config import config_from_hf, read_config
    from jdllm.models.weights import abstract_params
    from jdllm.serving.adaptive.verifier import Verifier, check_verifier
    from jdllm.serving.adaptive.verifier_keys import verifier_bytes

    config = config_from_hf(read_config(config_path(source)))
    # Which ids the tokenizers share changes no memory.
    check_verifier(config, None, workload.config, None, shares_ids=True)
    return verifier_bytes(Verifier(abstract_params(config, workload.dtype), config), rows)


def card_of(target: str | None, memory: str | None) -> "Card":
    """The card that is here, unless another is named; nothing is asked where a name and memory are given."""
    from jdllm.planning.card import DEFAULT_TARGET, described_card, visible_card

    known = [AUTO, *described_targets()]
    if target not in (None, *known):
        raise ConfigError(f"--target is {target!r}, expected one of {', '.join(known)}")
    named = None if target == AUTO else target
    if named is not None and memory is not None:
        return described_card(named)
    here = visible_card()
    if here is None and target == AUTO:
        raise ConfigError("no CUDA device is visible: name a card instead of --target auto, as --target h200")
    if here is not None and (named is None or (here.described and here.target == named)):
        return here
    return described_card(named or DEFAULT_TARGET)


def assumed(target: str | None, memory: str | None, card: "Card") -> list[str]:
    """Lines that say what was taken for options that were not given."""
    from jdllm.byte_sizes import format_bytes

    lines = []
    if target in (None, AUTO):
        here = "no CUDA device is visible" if card.name == card.target else f"{card.name} is here"
        if not card.described:
            here += ", of a compute capability that no target has"
        lines.append(f"{here}: planned for {card.target} (--target)")
    if memory is None:
        allotted = format_bytes(card.default_memory)
        lines.append(f"memory is the {allotted} that XLA may allot by default of {card.name} (--memory)")
    return [*lines, ""] if lines else []


def config_path(model: str) -> Path:
    """The config.json of a checkpoint, of which nothing else is read or downloaded."""
    from jdllm.checkpoints.loading import resolve

    path = os.path.expanduser(model)
    if os.path.isfile(path):
        return Path(path)
    if os.path.isdir(path) or model.count("/") != 1 or model.startswith((".", "/", "~")):
        return resolve(model)
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(model, "config.json"))
    except Exception as e:  # the hub's own errors, and those of the system and of its HTTP library
        raise CheckpointError(
            f"there is no file or directory {model}, and the hub does not give a config.json of that id: {e}"
        ) from None


def _model(
    path: Path,
    overrides: dict[str, Any] | None,
    dtype: str,
    cards: int,
    quantization: "WeightForm | None",
) -> tuple["ModelConfig", str]:
    """The model that is planned for, and the type of its weights."""
    from jdllm.checkpoints.default_form import DefaultForm, default_form
    from jdllm.models.hf_config import config_from_hf, read_config

    values = {**read_config(path), **(overrides or {})}
    config = dataclasses.replace(config_from_hf(values), cards=cards)
    dtype = _dtype(path, config, dtype)
    if config.mask_id is None:
        # Some families name it in the tokenizer. Memory does not depend on it, but compiling needs one.
        config = dataclasses.replace(config, mask_id=config.vocab_size - 1)
    forms = DefaultForm(quantization)
    if quantization is None:
        with contextlib.suppress(CheckpointError):  # of a config.json without weights
            forms = default_form(checkpoint_of(path), config, values)
    return config.quantised(*forms), dtype


def _dtype(path: Path, config: "ModelConfig", dtype: str) -> str:
    """The type that `LLM` would load the weights in; that of no weights and no word of them is bfloat16."""
    from jdllm.checkpoints.index import DTYPES
    from jdllm.checkpoints.loading import resolve_dtype

    names = ["auto", *(known.name for known in DTYPES.values())]
    if dtype not in names:
        raise ConfigError(f"--dtype is {dtype!r}, expected one of {', '.join(names)}")
    try:
        return resolve_dtype(checkpoint_of(path), config, dtype)
    except CheckpointError:
        return "bfloat16"


def checkpoint_of(path: Path) -> Path:
    """The directory of a checkpoint, of which `path` may be the config.json, or a GGUF file."""
    from jdllm.gguf_files import is_gguf

    return path if path.is_dir() or is_gguf(path) else path.parent
