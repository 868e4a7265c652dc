"""How long a step takes, estimated from its arithmetic and from what a card reaches."""

from typing import NamedTuple

from jdllm.execution.offload.tiers import transfer_bytes
from jdllm.execution.paged.pool import PAGE_ROWS, pool_bytes
from jdllm.models.config import ModelConfig
from jdllm.models.leaf import nbytes
from jdllm.models.weights import abstract_params, param_bytes, tree_bytes
from jdllm.planning.layered import LayeredPlan
from jdllm.planning.plan import MemoryPlan, Workload


class Rates(NamedTuple):
    """What a card does in a second.

    - `flops`: operations of 16-bit matrix products; `flops_f32` of products in full float32.
    - `bytes`: of its own memory; `host_bytes` to it from pinned host memory.
    - `measured`: whether 16-bit steps of jdllm reach this; otherwise they are the data sheet's numbers.
    - `decode`: bytes of its own memory while a causal model generates token after token, where that was
      measured.
    """

    flops: float
    flops_f32: float
    bytes: float
    host_bytes: float
    measured: bool = False
    decode: float | None = None


RATES = {
    "rtx3090": Rates(71e12, 35.6e12, 0.936e12, 31.5e9),
    "rtx4090": Rates(165.2e12, 82.6e12, 1.008e12, 31.5e9),
    "rtx5090": Rates(209.5e12, 104.8e12, 1.792e12, 63e9),
    "a100-40gb": Rates(312e12, 19.5e12, 1.555e12, 31.5e9),
    "a100-80gb": Rates(312e12, 19.5e12, 2.039e12, 31.5e9),
    "l40s": Rates(362e12, 91.6e12, 0.864e12, 31.5e9),
    "h100": Rates(630e12, 67e12, 2.4e12, 43e9, measured=True, decode=2.25e12),
    "h200": Rates(650e12, 67e12, 4.3e12, 51e9, measured=True),
    "b200": Rates(2250e12, 75e12, 7.7e12, 63e9),
}
"""By target. What is not measured is from NVIDIA's white papers (GA102, Ada, RTX Blackwell, A100, H100) and
data sheets (L40S, HGX B200): dense bfloat16 products with sums in float32, which a GeForce card makes at half
the rate of sums in float16, and one direction of 16 lanes of PCIe 4.0 or 5.0. An H100 has the rates of
`causal_llama-3.1-8b.json`, `causal_long_llama-3.1-8b.json` and `prefilling_dream-7b_dream.json`, in
`benchmarks/results`."""


class StepTime(NamedTuple):
    """An estimate: `seconds` of a step whose products run at `flops` a second; `measured` says whether steps
    of jdllm reach the card's rates; otherwise the data sheet gives the rates. Transfers from host memory
    alone take `link_seconds`."""

    seconds: float
    flops: float
    measured: bool
    link_seconds: float = 0.0

    def __str__(self) -> str:
        source = "measured" if self.measured else "data-sheet"
        rate = f"the {source} rate, {self.flops / 1e12:g} TFLOP/s"
        return f"{estimated(self.seconds, self.measured)} (estimate at {rate})"


def step_time(workload: Workload, plan: MemoryPlan, target: str) -> StepTime:
    """Estimate a full step, a cache's refresh included.

    Arguments:
    - `workload`, `plan`: what was planned.
    - `target`: a card that `RATES` has.

    Returns the longest of the times that products, reading the weights, and transfers from host memory would
    take alone.
    """
    config, rates = workload.config, RATES[target]
    full = workload.dtype == "float32"
    flops = rates.flops_f32 if full else rates.flops
    moved = plan.streamed_bytes
    if plan.tiers is not None:
        moved += config.num_layers * max(transfer_bytes(config, plan.tiers, plan.rows, workload.dtype))
    link = moved / rates.host_bytes
    products = step_flops(config, plan.rows, plan.head_rows) / flops
    seconds = max(products, plan.weights_bytes / rates.bytes, link)
    return StepTime(seconds, flops, rates.measured and not full, link)


def layered_time(
    workload: Workload, plan: MemoryPlan, layered: LayeredPlan, streamed: int, target: str
) -> StepTime:
    """The same of a refresh that runs layer by layer, while keys leave for host memory.

    Arguments:
    - `plan`: of the same step as if it ran at once.
    - `layered`: how it runs.
    - `streamed`: bytes of weights that come from host memory.
    """
    time = step_time(workload, plan, target)
    link = max(streamed, layered.host_bytes) / RATES[target].host_bytes
    return time._replace(seconds=max(time.seconds, link), link_seconds=link)


def step_flops(config: ModelConfig, rows: int, head_rows: int) -> float:
    """Floating-point operations of one full step of one segment.

    Rows of a causal model see half of it, and those of a block-causal model the rest of their blocks too.
    """
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    widths = config.num_layers * config.intermediate_size
    if config.moe is not None:
        sparse = config.num_layers - len(config.moe.dense_layers)
        per_row = config.moe.top_k * config.moe.expert_size + config.moe.shared_size + config.moe.experts / 3
        widths = sparse * per_row + len(config.moe.dense_layers) * config.intermediate_size
    projections = config.hidden_size * (config.num_layers * (2 * q + 2 * kv) + 3 * widths)
    block = {"causal": 1, "block_causal": config.block_length}.get(config.attention) or rows
    seen = rows * (rows + block) / 2
    attention = config.num_layers * 2 * seen * q
    return 2.0 * (rows * projections + attention + head_rows * config.hidden_size * config.vocab_size)


def prefill_seconds(workload: Workload, rates: Rates, tokens: int, parts: int) -> float:
    """Estimated seconds of a prompt of so many tokens that is evaluated in so many parts."""
    config, dtype = workload.config, workload.dtype
    flops = rates.flops_f32 if dtype == "float32" else rates.flops
    return max(step_flops(config, tokens, 1) / flops, parts * param_bytes(config, dtype) / rates.bytes)


def weights_read(config: ModelConfig, dtype: str, rows: int) -> float:
    """Bytes of the weights that an evaluation of so many rows reads.

    Of an embedding that is no head too it reads single rows. Of experts it reads those that some row chooses:
    as many as are to be expected if all are as likely.
    """
    params = abstract_params(config, dtype)
    total = tree_bytes(params) - (0 if config.tied_head else nbytes(params["embed"]))
    if config.moe is None:
        return total
    experts = sum(nbytes(leaf) for name, leaf in params["layers"].items() if name.startswith("experts_"))
    return total - experts * (1 - config.moe.top_k / config.moe.experts) ** rows


def evaluation_bytes(config: ModelConfig, dtype: str, rows: int, stored: float) -> float:
    """Bytes that an evaluation of so many rows reads, behind so many stored rows of all requests together."""
    return weights_read(config, dtype, rows) + pool_bytes(config, dtype, 1, PAGE_ROWS) * stored / PAGE_ROWS


def evaluation_seconds(
    config: ModelConfig, dtype: str, rates: Rates, requests: int, rows: float, stored: int
) -> float:
    """Estimated seconds of an evaluation, the longer of the times of its products and of its bytes.

    Arguments:
    - `requests`: that it has.
    - `rows`, `stored`: of each of them: rows that are evaluated, and stored ones that these see.
    """
    together = round(requests * rows)
    flops = step_flops(config, together, together)
    flops += 4.0 * config.num_layers * config.num_heads * config.head_dim * together * stored
    rate = rates.flops_f32 if dtype == "float32" else rates.flops
    return max(flops / rate, evaluation_bytes(config, dtype, together, requests * stored) / rates.bytes)


def estimated(seconds: float, measured: bool) -> str:
    """An estimated time; at a rate that nobody measured it is a bound."""
    return f"{'about' if measured else 'at least'} {format_seconds(seconds)}"


def format_seconds(seconds: float) -> str:
    """A time in the unit that leaves at least one digit before the point, such as "104 ms" or "2.3 min"."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{1000 * seconds:.3g} ms"
