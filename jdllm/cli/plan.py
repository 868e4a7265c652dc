"""`jdllm plan`: the memory of one denoising step on a card, without the card and without weights."""

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from jdllm.cli.options import Json
from jdllm.cli.report import print_result
from jdllm.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from jdllm.decoding.sampling import Cache
    from jdllm.models.config import ModelConfig
    from jdllm.planning.plan import MemoryPlan, Workload

DOES_NOT_FIT = 3


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint directory, hub id, or path of a config.json.",
            show_default=False,
        ),
    ],
    context: Annotated[int, typer.Option(help="Tokens of the sequence, masks included.", show_default=False)],
    memory: Annotated[
        str, typer.Option(metavar="BYTES", help="Memory of the device, such as 24GiB.", show_default=False)
    ],
    mask_ratio: Annotated[float, typer.Option(help="Masked tokens per token.")] = 0.5,
    target: Annotated[str, typer.Option(metavar="h200|a100|l40s", help="The card.")] = "h200",
    cache_policy: Annotated[
        str,
        typer.Option(metavar="none|prefix|dual|selective|sparse|head_sparse", help="What the KV pool keeps."),
    ] = "none",
    retention: Annotated[float, typer.Option(help="Share of the keys that a sparse policy keeps.")] = 0.5,
    dtype: Annotated[
        str, typer.Option(metavar="float32|bfloat16|float16", help="Type of weights and activations.")
    ] = "bfloat16",
    host_memory: Annotated[
        str, typer.Option(metavar="BYTES", help="Host memory for what the device cannot hold.")
    ] = "128GiB",
    host_tiers: Annotated[
        bool, typer.Option("--host-tiers/--no-host-tiers", help="Whether host memory may be used.")
    ] = True,
    max_num_logits: Annotated[
        int | None,
        typer.Option(min=1, help="Rows whose logits may exist at a time.", show_default="as many as fit"),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw the memory timeline: .png, .svg or .pdf.", show_default=False
        ),
    ] = None,
    check: Annotated[
        bool | None,
        typer.Option(
            "--check/--no-check",
            help="Compile the step for the card and compare.",
            show_default="on, with --json off",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan the memory of one denoising step, and find the longest context that fits.

    Needs a configuration only: no weights and no GPU. A context that does not fit ends with exit code 3.
    """
    from jdllm.planning.budget import parse_bytes
    from jdllm.planning.plan import Budget, max_context, plan_memory

    workload = _workload(
        _read_model(model),
        target,
        dtype,
        mask_ratio=mask_ratio,
        cache_policy=cast("Cache", cache_policy),
        retention=retention,
        max_num_logits=max_num_logits,
    )
    budget = Budget(parse_bytes(memory, "--memory"), host=parse_bytes(host_memory, "--host-memory"))
    found = plan_memory(workload, context, budget, host_tiers=host_tiers)
    on_device = max_context(workload, budget, host_tiers=False)
    longest = max_context(workload, budget) if host_tiers else on_device
    check = not as_json if check is None else check
    if plot is not None:
        _draw(workload, found, plot)
    compiled = _compile(workload, found, target) if check else None
    if as_json:
        facts = {
            "target": target,
            "cache_policy": cache_policy,
            **_facts(found),
            "max_context": longest,
            "max_context_without_host_tiers": on_device,
            "compiler_peak_bytes": None if compiled is None else found.fixed_bytes + compiled,
        }
        print_result(json.dumps(facts))
    else:
        contexts = f"{longest} tokens" + (f" ({on_device} without host tiers)" if host_tiers else "")
        compared = _compared(found, compiled, check)
        print_result(f"{_describe(found, target)}\n\n{compared}\nlongest context: {contexts}")
    if not found.fits:
        fitting = f"the longest context that fits is {longest} tokens" if longest else "no context fits"
        typer.echo(f"error: {_need(found)}: {fitting}", err=True)
        raise typer.Exit(DOES_NOT_FIT)


def _read_model(model: str) -> "ModelConfig":
    """The configuration of a checkpoint, of which nothing else is read or downloaded."""
    from jdllm.models.config import ModelConfig
    from jdllm.models.loading import resolve

    path = os.path.expanduser(model)
    if os.path.isfile(path):
        return ModelConfig.from_hf(path)
    if os.path.isdir(path) or model.count("/") != 1 or model.startswith((".", "/", "~")):
        return ModelConfig.from_hf(resolve(model))
    import huggingface_hub

    try:
        return ModelConfig.from_hf(Path(huggingface_hub.hf_hub_download(model, "config.json")))
    except ConfigError:
        raise
    except Exception as e:  # the hub's own errors, and those of the system and of its HTTP library
        raise CheckpointError(
            f"there is no file or directory {model}, and the hub does not give a config.json of that id: {e}"
        ) from None


def _workload(config: "ModelConfig", target: str, dtype: str, **rest: Any) -> "Workload":
    """What is planned for; `rest` are fields of `Workload` as they are."""
    from jdllm.models.loading import DTYPES
    from jdllm.pallas.attention.limits import HEAD_DIMS
    from jdllm.planning.aot import is_hopper
    from jdllm.planning.plan import Workload

    names = [known.name for known in DTYPES.values()]
    if dtype not in names:
        raise ConfigError(f"--dtype is {dtype!r}, expected one of {', '.join(names)}")
    hopper = is_hopper(target) and dtype != "float32" and config.head_dim in HEAD_DIMS
    if config.mask_id is None:
        # Some families name it in the tokenizer. Memory does not depend on it, but compiling needs one.
        config = dataclasses.replace(config, mask_id=config.vocab_size - 1)
    return Workload(config, dtype, hopper, **rest)


def _compile(workload: "Workload", found: "MemoryPlan", target: str) -> int | None:
    """Bytes that the compiler allots to the activations, or `None` where it cannot be asked."""
    import jax

    from jdllm.planning.verify import compiler_temp_bytes

    # A card that happens to be here is not needed: JAX would reserve most of its memory.
    jax.config.update("jax_platforms", "cpu")
    logging.getLogger("absl").setLevel(logging.ERROR)
    return compiler_temp_bytes(workload, found, target)


def _draw(workload: "Workload", found: "MemoryPlan", path: Path) -> None:
    """The timeline of the plan below that of the same step with nothing cut."""
    from jdllm.planning.report import timeline
    from jdllm.planning.search import search
    from jdllm.planning.templates import step_template
    from jdllm.planning.tier_template import tier_template

    config, kind, dims = workload.config, workload.kind, {"T": found.rows, "M": found.head_rows}
    template = step_template(config, kind)
    if found.tiers is not None:
        template = tier_template(config, kind, found.tiers, found.rows, workload.dtype)
    available = max(0, found.budget.device - found.fixed_bytes)
    whole = search(template, dims, dict.fromkeys(found.activation.counts, (1,)), available)
    timeline(whole, found.activation, path, available)


def _facts(found: "MemoryPlan") -> dict[str, Any]:
    activation = found.activation
    enough_host = found.host_bytes <= found.budget.host
    return {
        "fits": found.fits,
        "context": found.context,
        "rows": found.rows,
        "head_rows": found.head_rows,
        "budget_bytes": found.budget.device,
        "peak_bytes": found.peak_bytes,
        "weights_bytes": found.weights_bytes,
        "kv_pool_bytes": found.kv_pool_bytes,
        "overhead_bytes": found.budget.overhead,
        "batch_bytes": found.batch_bytes,
        "activation_peak_bytes": activation.peak_bytes,
        "peak_op": activation.peak_op,
        "peak_to_average": activation.peak_to_average,
        "chunks": dataclasses.asdict(found.chunks),
        "host_tiers": found.host_tiers,
        "host_bytes": found.host_bytes,
        "host_budget_bytes": found.budget.host,
        "stop_reason": activation.stop_reason if enough_host else "host memory is too small",
        "plan_seconds": found.seconds,
    }


def _describe(found: "MemoryPlan", target: str) -> str:
    """The verdict, where the bytes go, how the step is cut, and the tensors at the peak."""
    from jdllm.planning.report import format_bytes, format_peak_table

    account = {
        "weights": found.weights_bytes,
        "KV pool": found.kv_pool_bytes,
        "overhead": found.budget.overhead,
        "batch": found.batch_bytes,
        "activations": found.activation.peak_bytes,
        "host memory": found.host_bytes,
    }
    chunks = ", ".join(f"{name} {count}" for name, count in dataclasses.asdict(found.chunks).items())
    tiers = "none"
    if found.tiers is not None:
        tiers = f"{', '.join(found.host_tiers)} ({found.tiers.chunk_rows} rows at a time)"
    return "\n".join(
        [
            f"{'fits' if found.fits else 'does not fit'} on {target}: {_need(found)}",
            "",
            *[f"{name:<12}{format_bytes(size):>12}" for name, size in account.items()],
            "",
            f"chunks: {chunks}",
            f"host tiers: {tiers}",
            "",
            format_peak_table(found.activation),
        ]
    )


def _compared(found: "MemoryPlan", compiled: int | None, asked: bool) -> str:
    """The predicted activations beside those of the compiler."""
    from jdllm.planning.report import format_bytes

    planned = found.activation.peak_bytes
    if compiled is not None:
        compiler = f"{format_bytes(compiled)} (plan {planned / compiled - 1:+.1%})"
    elif not asked:
        compiler = "not checked"
    elif found.tiers is not None:
        compiler = "not checked (with host tiers the step is many executables)"
    else:
        compiler = "not checked (needs the cuda13 extra)"
    return f"predicted peak of activations: {format_bytes(planned)}\ncompiler: {compiler}"


def _need(found: "MemoryPlan") -> str:
    from jdllm.planning.report import format_bytes

    peak, available = format_bytes(found.peak_bytes), format_bytes(found.budget.device)
    need = f"{found.context} tokens need {peak} of the device's {available}"
    if found.tiers is not None:
        need += f" and {format_bytes(found.host_bytes)} of {format_bytes(found.budget.host)} host memory"
    return need
