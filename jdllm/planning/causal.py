"""What a prompt of a causal model takes, and each token behind it, before anything runs."""

from typing import NamedTuple

from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.planning.account import Account
from jdllm.planning.ladder import prefill_chunk
from jdllm.planning.layered import Layered, LayeredPlan, longest_layered, plan_layered
from jdllm.planning.plan import Workload
from jdllm.planning.step_time import RATES, Rates, prefill_seconds


class CausalPlan(NamedTuple):
    """A prompt and the tokens behind it, on one card.

    - `prompt`: its tokens; `fits`: whether these and the generated tokens have room.
    - `layered`: how they have it where the KV pool is too small; `None` where it is not, or nothing fits.
    - `parts`: in which the prompt is evaluated; `rows`: of the largest.
    - `prefill_seconds`: to the first token; `back_seconds`: until keys are back on the device before the
      second; `token_seconds`: to each further one, at that length. Of these, transfers of weights from host
      memory take `prefill_transfer_seconds`, and transfers of keys and weights `transfer_seconds`. Estimates
      from arithmetic and bytes; of a token in a dispatch of its own.
    - `prefill_measured`, `token_measured`: whether they are at rates that were measured.
    - `peak_bytes`: of the device; `host_bytes`: of pinned host memory.
    - `longest`: tokens of the longest prompt in the pool; `longest_layered`: of the longest that has room at
      all, 0 where the pool has the longest.
    """

    prompt: int
    fits: bool
    layered: LayeredPlan | None
    parts: int
    rows: int
    prefill_seconds: float
    back_seconds: float
    token_seconds: float
    transfer_seconds: float
    prefill_transfer_seconds: float
    peak_bytes: int
    host_bytes: int
    longest: int
    longest_layered: int
    prefill_measured: bool
    token_measured: bool


def plan_causal(
    workload: Workload, account: Account, target: str, prompt: int | None, generated: int = 1
) -> CausalPlan:
    """Plan a prompt of a causal model.

    Arguments:
    - `workload`: the model and its type.
    - `account`: of an engine.
    - `target`: a card that `jdllm.planning.step_time.RATES` has.
    - `prompt`: its tokens; by default as many as have room.
    - `generated`: tokens behind it.
    """
    rates = RATES[target]
    longest = max(0, (account.pages - 1) * PAGE_ROWS - generated)
    model = Layered.of_account(workload.config, workload.dtype, account)
    beyond = 0 if model is None else longest_layered(model, generated)
    tokens = max(longest, beyond) if prompt is None else prompt
    layered = None
    if model is not None and tokens > longest:
        layered = plan_layered(model, tokens, generated)
    chunk = prefill_chunk(account.rows) if layered is None else layered.layering.chunk
    parts = -(-tokens // chunk)
    overhead = 0 if account.budget is None else account.budget.overhead
    peak = account.weights + overhead + account.pool_bytes + account.largest_step
    weights = account.streamed / rates.host_bytes
    streamed = weights + (0.0 if layered is None else layered.streamed_bytes / rates.host_bytes)
    read = weights * (parts if layered is None else 1)
    return CausalPlan(
        prompt=tokens,
        fits=0 < tokens <= longest or layered is not None,
        layered=layered,
        parts=parts,
        rows=min(tokens, chunk),
        prefill_seconds=max(read, prefill_seconds(workload, rates, tokens, parts)),
        back_seconds=0.0 if layered is None else layered.back_bytes / rates.host_bytes,
        token_seconds=max(streamed, _token_seconds(workload, account, rates, tokens)),
        transfer_seconds=streamed,
        prefill_transfer_seconds=read,
        peak_bytes=peak if layered is None else max(layered.prompt_bytes, layered.token_bytes),
        host_bytes=account.streamed + (0 if layered is None else layered.host_bytes),
        longest=longest,
        longest_layered=beyond if beyond > longest else 0,
        prefill_measured=rates.measured and workload.dtype != "float32",
        token_measured=rates.decode is not None and workload.dtype != "float32",
    )


def _token_seconds(workload: Workload, account: Account, rates: Rates, tokens: int) -> float:
    """Estimated by the bytes that are read on the device."""
    keys = account.page_bytes * tokens // PAGE_ROWS
    return (account.weights + keys) / (rates.decode or rates.bytes)
