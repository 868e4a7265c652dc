"""The graph template of a layer and the head where the residual stream is in host memory.

The host drives small executables (`jdllm.execution.offload.forward`): the arrays that they exchange are
inputs of this graph, and what each needs while it runs is an operator's scratch.
"""

from jdllm.execution.offload.tiers import HostTiers, device_buffers
from jdllm.models.config import ModelConfig
from jdllm.planning.graph import GraphTemplate
from jdllm.planning.templates import StepKind, add_feed_forward, add_head


def tier_template(
    config: ModelConfig, kind: StepKind, tiers: HostTiers, rows: int, dtype: str
) -> GraphTemplate:
    """The template for `rows` packed rows, over the dimensions M (head rows) and logits (chunks of them)."""
    graph = GraphTemplate(f"{config.family}, tiered")
    chunk = min(tiers.chunk_rows, rows)
    buffers = device_buffers(config, tiers, rows, dtype)
    for name, size in buffers.items():
        graph.add_input(name, size)
    heads, kv_heads = tiers.heads(config)
    hidden, width, kv_width = (
        chunk * n * kind.itemsize
        for n in (config.hidden_size, heads * config.head_dim, kv_heads * config.head_dim)
    )
    angles = chunk * 4 * config.head_dim
    graph.add_op("project k v", scratch=hidden + 2 * kv_width + angles)
    graph.add_op("attention", scratch=hidden + 2 * width + angles)
    graph.add_op("finish", outputs={"h": hidden})
    add_feed_forward(graph, config, kind, "finish", chunk, config.moe is None)
    graph.add_barrier("end of layer", buffers)
    graph.add_op(
        "fetch hidden rows",
        outputs={"hidden chunks": 3 * hidden},
    )
    add_head(graph, config, kind, "hidden chunks")
    graph.add_barrier("end of head", ["hidden chunks"])
    return graph
