"""What cutting the feed-forward layer and the logits into chunks of rows saves of the memory of a prompt."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.planning.card import Row
from benchmarks.shapes import CAUSAL_SHAPES
from jdllm.models.config import ModelConfig
from jdllm.pallas.device import Kernels, Target
from jdllm.planning.account import make_account
from jdllm.planning.aot import device_of
from jdllm.planning.budget import Budget
from jdllm.planning.plan import Workload
from jdllm.planning.planner import first_fit
from jdllm.planning.templates import step_template

GIB = 2**30
TOKENS = (8192, 16384, 32768, 65536, 131072)
FFN_ROWS, LOGITS_ROWS = 4096, 512
_KERNELS: tuple[Kernels, ...] = ("auto", "xla")
_HEAD = ("project logits", "choose")
_FFN = (" project gate", " project up", " multiply", " project down")


class Peaks(NamedTuple):
    """Bytes of activations: the most that are alive in the feed-forward layer and in the head, and in all."""

    ffn: int
    logits: int
    total: int


def peaks(config: ModelConfig, device: Target, tokens: int, *, cut: bool) -> Peaks:
    """The planned peaks of one evaluation of a whole prompt with logits of every row, as of a scored text.

    Arguments:
    - `cut`: whether the feed-forward layer has `FFN_ROWS` rows at a time, and the head `LOGITS_ROWS`.
    """
    counts = dict.fromkeys(("logits", "ffn", "query", "kv", "heads"), 1)
    if cut:
        counts |= {"ffn": tokens // FFN_ROWS, "logits": tokens // LOGITS_ROWS}
    template = step_template(config, Workload(config, device=device).kind)
    graph = template.instantiate({"T": tokens, "M": tokens, **counts})
    alive = list(zip(graph.ops, graph.live_bytes.tolist(), strict=True))
    return Peaks(
        ffn=max(live for op, live in alive if op.endswith(_FFN)),
        logits=max(live for op, live in alive if op in _HEAD),
        total=first_fit(graph).peak,
    )


def mini_sequences(
    shapes: Sequence[str] = tuple(CAUSAL_SHAPES), lengths: Sequence[int] = TOKENS
) -> list[Row]:
    """Peaks of whole prompts, with nothing cut and with both cut, by kernels.

    With `auto` the kernel of the head keeps no logits. The last column is the largest step of an engine in
    80 GiB, which reads prompts in parts of at most 8192 rows.
    """
    table: list[Row] = []
    for shape, kernels in itertools.product(shapes, _KERNELS):
        config, device = CAUSAL_SHAPES[shape], device_of("h200", kernels)
        account = make_account(config, "bfloat16", Budget(80 * GIB), device=device)
        for tokens in lengths:
            whole, cut = (peaks(config, device, tokens, cut=cut) for cut in (False, True))
            table.append(
                {
                    "shape": shape,
                    "kernels": kernels,
                    "tokens": tokens,
                    **{f"{name}_gib": size / GIB for name, size in whole._asdict().items()},
                    **{f"cut_{name}_gib": size / GIB for name, size in cut._asdict().items()},
                    "lower_by": whole.total / cut.total,
                    "in_parts_gib": account.largest_step / GIB,
                }
            )
    return table
