"""What mask-only logits, planned lifetimes and lazy chunking are worth: longest contexts, each of them off.

The part `ablation` of the case `plan`, which needs no card. No option of jdllm switches these off. So the
part plans by the planner's own graph, with another number of head rows, another rule for lifetimes, or no
choice of chunk counts:

- Mask-only logits off: every row of the sequence meets the output head.
- Manager off: nobody plans the step as a whole. Each layer, and the head, has memory of its own for each of
  its tensors until it ends, and the next layer takes over this memory. Tensors that go from layer to layer
  are updated in place as before. The chunks of an operator still use the same memory one after another.
- Lazy chunking off: nothing is cut.

Source: Mosaic names the three. It measured against frameworks that reserve memory by rules of their own, so
its gains differ from these. Where the compiler for CUDA is installed, each step that has planned lifetimes is
compiled for an H200, too: XLA is the manager, and says what it allots.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from benchmarks.shapes import SHAPES
from jdllm.chunks import ChunkConfig
from jdllm.models.weights import param_bytes
from jdllm.planning.aot import device_of
from jdllm.planning.checks.compiler import compiler_temp_bytes
from jdllm.planning.graph import Count, Graph, GraphTemplate
from jdllm.planning.plan import Budget, Workload, bucket_of, ladders, longest_fitting, plan_memory
from jdllm.planning.planner import ActivationPlan
from jdllm.planning.search import search
from jdllm.planning.templates import step_template

GIB = 2**30
SHAPE, BUDGET, TARGET = "llada-8b", 24, "h200"
MASK_RATIOS = (0.1, 0.5, 0.9)
AT = 32768
"""Tokens at which peaks are compared."""


class Means(NamedTuple):
    """Which means against a peak are on."""

    mask_only_logits: bool = True
    manager: bool = True
    lazy_chunking: bool = True


CASES = (
    Means(),
    Means(mask_only_logits=False),
    Means(manager=False),
    Means(lazy_chunking=False),
    Means(mask_only_logits=False, lazy_chunking=False),
    Means(False, False, False),
)
"""All, each one off, the manager alone, and none. Read from the end, the last three and the first add one
after another: none, the manager, mask-only logits, lazy chunking."""


_BY_COST = ("logits", "ffn", "query", "kv", "heads")
"""The counts, the one that costs least time first (docs/planning.md)."""


class Unplanned(GraphTemplate):
    """A graph whose layers and head have memory of their own for each tensor, until they end.

    Arguments:
    - `planned`: the same graph with the lifetimes that a plan relies on. Operators of layers have names that
      begin with "layer" and a number.
    """

    def __init__(self, planned: GraphTemplate):
        super().__init__(planned.name)
        self._planned = planned
        self.ops = planned.ops
        self._starts, self._ends = [], []
        for _, group in itertools.groupby(range(len(planned.ops)), lambda op: _part(planned.ops[op])):
            ops = list(group)
            self._starts += [ops[0]] * len(ops)
            self._ends += [ops[-1]] * len(ops)
            owned = {owner for op in ops for owner in planned.owners[op]}
            self.owners += [tuple(owner for owner in _BY_COST if owner in owned)] * len(ops)

    def instantiate(self, dims: Mapping[str, int]) -> Graph:
        """The graph with numbers put in, as `GraphTemplate.instantiate` does."""
        graph = self._planned.instantiate(dims)
        first = tuple(self._starts[op] for op in graph.first)
        last = tuple(self._ends[op] for op in graph.last)
        live = np.zeros(len(self.ops), np.int64)
        for size, start, end in zip(graph.sizes, first, last, strict=True):
            live[start : end + 1] += size
        return dataclasses.replace(graph, first=first, last=last, live_bytes=live)

    def live_bytes(self, dims: Mapping[str, Count]) -> Int64[np.ndarray, "ops *configs"]:
        """Live bytes of each operator, as `GraphTemplate.live_bytes` gives them."""
        numbers = {name: value for name, value in dims.items() if not isinstance(value, np.ndarray)}
        arrays = {name: value.tolist() for name, value in dims.items() if isinstance(value, np.ndarray)}
        if not arrays:
            return self.instantiate(numbers).live_bytes
        tried = [dict(zip(arrays, values, strict=True)) for values in zip(*arrays.values(), strict=True)]
        return np.stack([self.instantiate(numbers | values).live_bytes for values in tried], axis=1)

    def dims_of(self, op: int) -> frozenset[str]:
        """The dimensions on which live bytes may depend: all that some operator of its part has."""
        span = range(self._starts[op], self._ends[op] + 1)
        return frozenset[str]().union(*(self._planned.dims_of(op) for op in span))


def _part(op: str) -> str:
    """The layer of an operator, or "" for one of no layer."""
    return " ".join(op.split()[:2]) if op.startswith("layer ") else ""


def head_rows_of(workload: Workload, context: int, means: Means) -> int:
    """Rows that meet the output head."""
    bucket = bucket_of(workload, context)
    return bucket.head_rows if means.mask_only_logits else bucket.rows


def plan(workload: Workload, context: int, budget: Budget, means: Means) -> ActivationPlan:
    """The plan of a step on the device alone, with some of the means."""
    bucket, head_rows = bucket_of(workload, context), head_rows_of(workload, context, means)
    counts: dict[str, Sequence[int]] = dict(ladders(workload, bucket.rows, head_rows))
    if not means.lazy_chunking:
        counts = {name: ladder[:1] for name, ladder in counts.items()}
    template = step_template(workload.config, workload.kind)
    room = budget.beside(param_bytes(workload.config, workload.dtype)).device
    left = room - bucket.batch_bytes(workload.level)
    graph = template if means.manager else Unplanned(template)
    return search(graph, {"T": bucket.rows, "M": head_rows}, counts, left)


def longest(workload: Workload, budget: Budget, means: Means) -> int:
    """The longest context that fits with some of the means."""
    return longest_fitting(lambda rows: plan(workload, rows, budget, means).fits)


@functools.cache
def compiled_gib(workload: Workload, head_rows: int, chunks: ChunkConfig) -> float | None:
    """What XLA allots to a step of `AT` tokens; `None` where there is no compiler."""
    sizes = plan_memory(workload, AT, Budget(BUDGET * GIB), host_tiers=False)
    step = dataclasses.replace(sizes, head_rows=head_rows, chunks=chunks)
    found = compiler_temp_bytes(workload, step, TARGET)
    return None if found is None else found / GIB


def ablation() -> list[dict[str, Any]]:
    """Longest contexts of LLaDA-8B in 24 GiB and peaks at 32,768 tokens, by mask ratio and by kernels.

    With the kernels of Hopper ("auto") no logits are ever stored. With portable forms ("xla") those of a
    chunk of head rows are. `of_all` is the longest context over that with all means. Peaks are those of
    activations, and `compiler_gib` is what XLA allots to the same step.
    """
    budget, table = Budget(BUDGET * GIB), []
    for kernels, mask_ratio in itertools.product(("auto", "xla"), MASK_RATIOS):
        workload = Workload(SHAPES[SHAPE], device=device_of(TARGET, kernels), mask_ratio=mask_ratio)
        contexts = [longest(workload, budget, means) for means in CASES]
        for means, context in zip(CASES, contexts, strict=True):
            at, head_rows = plan(workload, AT, budget, means), head_rows_of(workload, AT, means)
            # The mask ratio is that of the sizes, so that cases of the same sizes are compiled once.
            sized = dataclasses.replace(workload, mask_ratio=head_rows / AT)
            compiled = compiled_gib(sized, head_rows, ChunkConfig(**at.counts)) if means.manager else None
            table.append(
                {
                    "shape": SHAPE,
                    "budget_gib": BUDGET,
                    "kernels": kernels,
                    "mask_ratio": mask_ratio,
                    **{name: "on" if value else "off" for name, value in means._asdict().items()},
                    "context": context,
                    "of_all": context / contexts[0],
                    f"peak_gib_at_{AT}": at.peak_bytes / GIB,
                    f"compiler_gib_at_{AT}": compiled,
                    f"fits_at_{AT}": at.fits,
                }
            )
    return table
