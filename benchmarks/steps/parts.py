"""Where the device time of an engine's parts goes, by kernel.

Run as `python3 -m benchmarks parts [--shape llada-8b] [--layers 8] [--batch 1 4 12] [--prompt 768]
[--trace DIR]` on a card, for a block model also with `[--block 4] [--per-forward 4]`. Equal requests generate
64 tokens with random weights: two blocks of 32, tokens of a causal model, or blocks of a block model, of
which each forward evaluation fills `--per-forward` tokens. The second time everything is compiled, and the
third time is traced. A row says what a kernel takes of a step of one executable; steps that store blocks too
count with the others.
`step_us` is the time in which any kernel of the executable runs. Few layers are enough to see where the time
of a layer goes, and are compiled sooner.
"""

import collections
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from benchmarks.cases import case_parser
from benchmarks.generations import BLOCK_LENGTH, generation, random_prompts
from benchmarks.record import record
from benchmarks.shapes import BLOCK_SHAPES, CAUSAL_SHAPES, SHAPES
from benchmarks.steps.profile import KernelEvent, busy_us, by_kernel, read_events
from jdllm.compiling.executable import module_name
from jdllm.decoding.registry import cache_names
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.serving.updates import PartDone

TOKENS, RETENTION = 2 * BLOCK_LENGTH, 0.5
SHOWN = 16


def traced(
    llm: LLM, lengths: Sequence[int], sampling: SamplingParams, left: Path | None
) -> list[dict[str, Any]]:
    """A row for each of the costliest kernels of each executable that serves such requests.

    Arguments:
    - `lengths`: tokens of each prompt.
    - `left`: where the trace is left; `None` for nowhere.
    """
    prompts, done = random_prompts(llm.config, lengths), list[PartDone]()
    for _ in range(2):
        llm.generate(prompt_token_ids=prompts, sampling=sampling)
        llm.engine.settle()
    llm.engine.observe = done.append
    with tempfile.TemporaryDirectory() as scratch:
        directory = left or Path(scratch)
        with jax.profiler.trace(directory):
            llm.generate(prompt_token_ids=prompts, sampling=sampling)
        events = read_events(directory)
    llm.engine.observe = None
    return by_part(events, done)


def by_part(events: Sequence[KernelEvent], done: Sequence[PartDone]) -> list[dict[str, Any]]:
    """The rows of `traced`.

    Arguments:
    - `events`: of the device; `done`: the parts that ran meanwhile.
    """
    steps = collections.Counter[str]()
    for part in done:
        steps[f"{part.kind.name.lower()} of {part.rows + part.padding} rows"] += part.steps
    table = []
    for name, count in steps.items():
        own = [event for event in events if event.module.endswith(module_name(name))]
        if own:
            of_step = {"part": name, "steps": count, "step_us": busy_us(own) / count}
            table += [of_step | row for row in by_kernel(own, count)[:SHOWN]]
    return table


def main(arguments: Sequence[str]) -> None:
    parser = case_parser("parts", __doc__)
    parser.add_argument("--shape", choices=[*SHAPES, *CAUSAL_SHAPES, *BLOCK_SHAPES], default="llada-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cache", choices=cache_names(), default="head_sparse")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 12])
    parser.add_argument("--prompt", type=int, default=768)
    parser.add_argument("--block", type=int, help="positions of a block model's block; by default its own")
    parser.add_argument("--per-forward", type=int, default=4, help="tokens of a block model")
    parser.add_argument("--trace", type=Path, help="where to leave the traces; by default nowhere")
    args = parser.parse_args(arguments)
    shape = (SHAPES | CAUSAL_SHAPES | BLOCK_SHAPES)[args.shape]
    config = dataclasses.replace(shape, num_layers=args.layers)
    if args.shape in CAUSAL_SHAPES:
        sampling = SamplingParams(max_tokens=TOKENS, early_stop=False)
    elif args.shape in BLOCK_SHAPES:
        config = dataclasses.replace(config, block_length=args.block or config.block_length)
        sampling = SamplingParams(
            gen_length=TOKENS,
            steps=TOKENS // args.per_forward,
            block_length=config.block_length,
            early_stop=False,
        )
    else:
        sampling = generation(args.cache, RETENTION, 0, TOKENS).changed(gen_length=TOKENS)
    model = Transformer(config, rngs=nnx.Rngs(0), dtype="bfloat16")
    with LLM(model, progress=False) as llm:
        table = [
            {"batch": batch, **row}
            for batch in args.batch
            for row in traced(llm, [args.prompt] * batch, sampling, args.trace and args.trace / str(batch))
        ]
    record(f"parts_{args.shape}", table, args.out, layers=args.layers, prompt=args.prompt, cache=args.cache)
