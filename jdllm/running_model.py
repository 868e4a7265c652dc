"""A model on its device, with the engine that runs its requests: what `LLM` starts from its options."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
from jax.extend import backend

from jdllm.byte_sizes import parse_bytes
from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.compiling import store as executable_store
from jdllm.compiling.executables import Executables
from jdllm.compiling.over_cards import everywhere, over_processes
from jdllm.compiling.store import ExecutableStore
from jdllm.decoding.sampling import SamplingParams
from jdllm.distributed import check_same, least
from jdllm.engine_options import EngineOptions, check_devices
from jdllm.errors import ConfigError
from jdllm.loaded_model import LoadedModel, load_model
from jdllm.models.adapter import Drafting
from jdllm.models.config import ModelConfig
from jdllm.models.leaf import device_of, dtypes_of
from jdllm.models.spread import in_parts, weight_shardings
from jdllm.models.weights import quantised, tree_bytes
from jdllm.models.whole_layers import keeps_whole_layers
from jdllm.pallas.device import Target, preferring, target
from jdllm.planning.account import Account, make_account
from jdllm.planning.budget import Budget, device_budget, pool_gaps, usable_host_memory
from jdllm.planning.ladder import DEFAULT_ROWS
from jdllm.planning.offloading import account_with_offloading
from jdllm.quantised import WeightForm
from jdllm.scoring import Scorer
from jdllm.serving.adaptive.verifier import Verifier, abstract_verifier, load_verifier
from jdllm.serving.adaptive.verifier_keys import verifier_bytes
from jdllm.serving.build import make_engine
from jdllm.serving.engine import Engine
from jdllm.stored_rows import KvCacheDtype


class Resident(NamedTuple):
    """The parts of a model that hold memory of the device."""

    engine: Engine
    scorer: Scorer


class RunningModel(NamedTuple):
    """A model that answers.

    - `config`, `tokenizer`, `default_sampling`: of the checkpoint.
    - `account`: how the memory of the device is shared out.
    - `executables`: where compiled steps are kept.
    - `parts`: the engine and the scorer.
    - `description`: in a few words, for people.
    """

    config: ModelConfig
    tokenizer: Tokenizer | None
    default_sampling: SamplingParams
    account: Account
    executables: Executables
    parts: Resident
    description: str


def start(options: EngineOptions) -> RunningModel:
    """Load a model, share out the memory of its device, and make its engine; raises as `LLM` does."""
    check_devices(options.devices, options.host_memory)
    # Nothing that several cards do needs memory of the host.
    host_memory = (
        0 if options.devices > 1 else usable_host_memory(jax.local_devices()[0], options.host_memory)
    )
    with preferring(options.kernels):
        runs_on = target()
    runs_on.check_card()
    device = _device(options)
    gaps = pool_gaps(device)
    budget = device_budget(device, options.memory, host_memory, held=_held(options))
    loaded = _load(options, budget, runs_on)
    dtype = dtypes_of(loaded.params).activations.name
    in_step = over_processes(loaded.params)
    # A process that finds an executable would not compile it with the others.
    store = None if in_step else _store(options.cache_dir)
    executables = Executables(device.platform, store, kernels=runs_on.kernels)
    verifier = _verifier(options, loaded, dtype)
    if budget is not None and options.memory is None:
        # Loading may leave gaps between arrays, in which no step runs.
        lost = pool_gaps(device) - gaps
        budget = dataclasses.replace(budget, device=budget.device - lost)
    if in_step and budget is not None:
        room, overhead = least([budget.device, -budget.overhead])
        budget = dataclasses.replace(budget, device=room, overhead=-overhead)
    account = make_account(
        loaded.config.on_card(),
        dtype,
        budget,
        device=executables.target,
        verifier_bytes=_verifier_bytes(options, verifier),
        weights_bytes=loaded.device_bytes,
        offloaded=loaded.config.offloaded,
        **_sizes(options),
    )
    if in_step:
        check_same("models, options or devices", repr((loaded.config, account, device.device_kind)))
    engine = make_engine(
        loaded.params,
        loaded.config,
        executables,
        account,
        chunks=options.chunks,
        max_num_logits=options.max_num_logits,
        verifier=verifier,
        eager_pool=device.platform != "cpu",
        drafting=Drafting(loaded.adapter, options.plain_drafts),
    )
    scorer = Scorer(
        loaded.params,
        loaded.config,
        executables,
        account,
        engine.between_parts,
        options.max_num_logits or 512,
    )
    return RunningModel(
        loaded.config,
        loaded.tokenizer,
        loaded.default_sampling,
        account,
        executables,
        Resident(engine, scorer),
        _described(loaded, device, budget),
    )


def _device(options: EngineOptions) -> Any:
    """Where the model is, or goes; of several cards the first."""
    if isinstance(options.model, str | Path):
        return backend.get_default_device()
    return device_of(options.model.params())


def _held(options: EngineOptions) -> int:
    """Bytes of models that are in memory already: the budget is for these. Parts for several cards, and
    matrices in few bits, are copies, beside a model that stays where it is."""
    if options.devices > 1:
        return 0
    used = (None if options.quantization else options.model), options.verifier
    models = [one for one in used if not isinstance(one, str | Path | None)]
    return sum(tree_bytes(one.params()) for one in models)


def _load(options: EngineOptions, budget: Budget | None, runs_on: Target) -> LoadedModel:
    """The model, from a checkpoint with as many layers in host memory as the device has no room for."""

    def count_offloaded(config: ModelConfig, dtype: str) -> int:
        if budget is None or options.devices > 1:
            return 0
        verifier = None if options.verifier is None else abstract_verifier(options.verifier, dtype)
        beside = _verifier_bytes(options, verifier)
        return account_with_offloading(
            config, dtype, budget, device=runs_on, verifier_bytes=beside, **_sizes(options)
        ).offloaded

    def keeps_whole(config: ModelConfig, dtype: str) -> bool:
        memory = None if budget is None else budget.device
        if memory is not None and config.cards > 1 and jax.process_count() > 1:
            (memory,) = least([memory])  # processes of several hosts have to agree
        return keeps_whole_layers(options.whole_layers, config, dtype, memory)

    if isinstance(options.model, str | Path):
        return load_model(
            options.model,
            options.dtype,
            options.hf_overrides or {},
            count_offloaded,
            keeps_whole,
            load_weights=options.load_weights,
            progress=options.progress,
            adapter=None if options.adapter is None else Path(options.adapter).expanduser(),
            quantization=_quantization(options),
            cards=options.devices,
            plain_drafts=options.plain_drafts,
            kv_cache_dtype=_kv_cache_dtype(options),
        )
    if options.dtype != "auto" or options.hf_overrides or options.adapter or not options.load_weights:
        raise ConfigError(
            "dtype, hf_overrides, adapter and load_weights are for checkpoints: a Transformer has its own"
        )
    params = options.model.params()
    config = dataclasses.replace(
        options.model.config, cards=options.devices, kv_cache_dtype=_kv_cache_dtype(options)
    )
    config = config.quantised(_quantization(options))
    whole_layers = keeps_whole(config, dtypes_of(params).weights.name)
    if options.devices == 1:
        return LoadedModel(config, params if config.quantization is None else quantised(params, config))
    placed = jax.device_put(params, weight_shardings(config))
    return LoadedModel(config, in_parts(placed, config, whole_layers=whole_layers))


def _quantization(options: EngineOptions) -> WeightForm | None:
    return cast(WeightForm | None, options.quantization)


def _kv_cache_dtype(options: EngineOptions) -> KvCacheDtype:
    return cast(KvCacheDtype, options.kv_cache_dtype)


def _verifier(options: EngineOptions, loaded: LoadedModel, dtype: str) -> Verifier | None:
    if options.verifier is None:
        return None
    verifier = load_verifier(
        options.verifier,
        loaded.config,
        loaded.tokenizer,
        dtype,
        shares_ids=options.verifier_shares_ids,
        load_weights=options.load_weights,
        progress=options.progress,
    )
    # Small beside the model: each of several cards has all of it.
    return verifier._replace(params=everywhere(verifier.params, loaded.params))


def _verifier_bytes(options: EngineOptions, verifier: Verifier | None) -> int:
    """Bytes of a verifier, whose weights may be abstract, and of what it stores; 0 without one."""
    return 0 if verifier is None else verifier_bytes(verifier, _rows(options) or DEFAULT_ROWS[0])


def _rows(options: EngineOptions) -> int | None:
    """Rows of the largest step as far as options say them: a verifier leaves no choice by memory."""
    if options.verifier is not None:
        return options.max_num_batched_tokens or DEFAULT_ROWS[0]
    return options.max_num_batched_tokens


def _sizes(options: EngineOptions) -> dict[str, int | None]:
    """Arguments of an account."""
    return {
        "max_num_batched_tokens": _rows(options),
        "max_num_logits": options.max_num_logits,
        "max_context": options.max_context,
        "kv_pool": None if options.kv_pool is None else parse_bytes(options.kv_pool, "kv_pool"),
    }


def _store(cache_dir: str | Path | None) -> ExecutableStore | None:
    if cache_dir == "auto":
        return executable_store.default_store()
    return None if cache_dir is None else ExecutableStore(Path(cache_dir))


def _described(loaded: LoadedModel, device: Any, budget: Budget | None) -> str:
    leaves = jax.tree.leaves(loaded.params)
    parameters = sum(leaf.size for leaf in leaves)
    largest = max(leaves, key=lambda leaf: leaf.size)
    memory = f"{sum(leaf.nbytes for leaf in leaves) / 2**30:.2f} GiB of weights"
    if budget is not None:
        memory += f" in {budget.device / 2**30:.2f} GiB"
    return (
        f"{loaded.config.family}, {parameters / 1e9:.3g}B parameters, {largest.dtype.name},"
        f" {device.device_kind}, {memory}"
    )
