"""What a prompt of a causal model takes, and each token behind it, before anything runs."""

from typing import NamedTuple

from jdllm.execution.paged.pool import PAGE_ROWS, pool_bytes
from jdllm.planning.account import Account
from jdllm.planning.ladder import prefill_chunk
from jdllm.planning.plan import Workload
from jdllm.planning.step_time import RATES, step_flops


class CausalPlan(NamedTuple):
    """A prompt and the tokens behind it, on one card.

    - `prompt`: its tokens; `fits`: whether the KV pool holds them and one more.
    - `parts`: in which it is evaluated; `rows`: of the largest.
    - `prefill_seconds`: to the first token; `token_seconds`: to each further one, at that length. Estimates
      from arithmetic and bytes.
    - `longest`: tokens of the longest prompt; `longest_token_seconds`: a token behind that.
    - `peak_bytes`: of the device.
    """

    prompt: int
    fits: bool
    parts: int
    rows: int
    prefill_seconds: float
    token_seconds: float
    longest: int
    longest_token_seconds: float
    peak_bytes: int


def plan_causal(workload: Workload, account: Account, target: str, prompt: int | None) -> CausalPlan:
    """Plan a prompt of a causal model.

    Arguments:
    - `workload`: the model and its type.
    - `account`: of an engine.
    - `target`: a card that `jdllm.planning.step_time.RATES` has.
    - `prompt`: its tokens; by default as many as fit.
    """
    longest = max(0, (account.pages - 1) * PAGE_ROWS - 1)
    tokens = longest if prompt is None else prompt
    chunk = prefill_chunk(account.rows)
    rates, full = RATES[target], workload.dtype == "float32"
    flops = step_flops(workload.config, tokens, 1) / (rates.flops_f32 if full else rates.flops)
    parts = -(-tokens // chunk)

    def token(rows: int) -> float:
        keys = pool_bytes(workload.config, workload.dtype, 1, PAGE_ROWS) * rows // PAGE_ROWS
        return (account.weights + keys) / rates.bytes

    overhead = 0 if account.budget is None else account.budget.overhead
    return CausalPlan(
        prompt=tokens,
        fits=0 < tokens <= longest,
        parts=parts,
        rows=min(tokens, chunk),
        prefill_seconds=max(flops, parts * account.weights / rates.bytes),
        token_seconds=token(tokens),
        longest=longest,
        longest_token_seconds=token(longest),
        peak_bytes=account.weights + overhead + account.pool_bytes + account.largest_step,
    )
