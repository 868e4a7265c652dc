"""What a prompt of a block model takes, and each evaluation of a block behind it, before anything runs."""

from typing import NamedTuple

from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.planning.account import Account
from jdllm.planning.ladder import prefill_chunk
from jdllm.planning.plan import Workload
from jdllm.planning.step_time import RATES, evaluation_bytes, prefill_seconds


class BlocksPlan(NamedTuple):
    """A prompt and a block behind it, on one card.

    - `prompt`: its tokens; `fits`: whether these have room, and a block behind them.
    - `block_length`: that the checkpoint states.
    - `parts`: in which the prompt is evaluated and stored; `rows`: of the largest.
    - `prefill_seconds`: until the first block begins. An estimate from arithmetic and bytes.
    - `evaluation_bytes`: that an evaluation of one block reads: stored keys at that length, and what
      `weights_read` counts. `evaluation_seconds`: the least time that these bytes take, or layers from host
      memory.
    - `prefill_transfer_seconds`, `transfer_seconds`: of the prompt's time and of an evaluation's, for layers
      from host memory.
    - `peak_bytes`: of the device.
    - `longest`: tokens of the longest prompt.
    - `measured`: whether `prefill_seconds` is at a rate that was measured.
    """

    prompt: int
    fits: bool
    block_length: int
    parts: int
    rows: int
    prefill_seconds: float
    evaluation_bytes: float
    evaluation_seconds: float
    prefill_transfer_seconds: float
    transfer_seconds: float
    peak_bytes: int
    longest: int
    measured: bool


def plan_blocks(workload: Workload, account: Account, target: str, prompt: int | None) -> BlocksPlan:
    """Plan a prompt of a block model.

    Arguments:
    - `workload`: the model and its type; on several cards the part of one card.
    - `account`: of an engine.
    - `target`: a card that `jdllm.planning.step_time.RATES` has.
    - `prompt`: its tokens; by default as many as have room and positions.
    """
    config, dtype, rates = workload.config, workload.dtype, RATES[target]
    assert config.block_length is not None  # a block model has one
    block = config.block_length
    longest = (account.pages - 1) * PAGE_ROWS // block * block  # the last block is not stored
    tokens = min(longest, config.max_positions - block) if prompt is None else prompt
    chunk = prefill_chunk(account.rows)
    parts = -(-tokens // chunk)
    overhead = 0 if account.budget is None else account.budget.overhead
    read = evaluation_bytes(config, dtype, block, tokens)
    streamed = account.streamed / rates.host_bytes
    return BlocksPlan(
        prompt=tokens,
        fits=0 < tokens <= longest,
        block_length=block,
        parts=parts,
        rows=min(tokens, chunk),
        prefill_seconds=max(parts * streamed, prefill_seconds(workload, rates, tokens, parts)),
        evaluation_bytes=read,
        evaluation_seconds=max(streamed, read / rates.bytes),
        prefill_transfer_seconds=parts * streamed,
        transfer_seconds=streamed,
        peak_bytes=account.weights + overhead + account.pool_bytes + account.largest_step,
        longest=longest,
        measured=rates.measured and dtype != "float32",
    )
