"""The cases that `python3 -m benchmarks` runs, and what their command lines have in common."""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jdllm.errors import JdllmError

Main = Callable[[Sequence[str]], int | None]


class Case(NamedTuple):
    """One benchmark.

    - `place`: module and function, which takes the options and may return an exit code.
    - `what`: one line of `--list`.
    """

    place: str
    what: str

    def load(self) -> Main:
        """The function; its module is imported now, and JAX or torch with it."""
        module, _, function = self.place.partition(":")
        return getattr(importlib.import_module(module), function)


CASES = {
    "generate": Case("benchmarks.generations:generate", "whole generations of equal requests"),
    "ragged": Case("benchmarks.generations:ragged", "32 requests of different lengths at once"),
    "overhead": Case("benchmarks.engine:overhead", "what a generation costs beside the device's time"),
    "traffic": Case("benchmarks.engine:traffic", "random requests: what compiles, what memory grows"),
    "first_token": Case("benchmarks.first_token:main", "from LLM(...) to a first block, in new processes"),
    "first_calls": Case("benchmarks.first_calls:main", "first calls of new processes, with the defaults"),
    "background": Case("benchmarks.background:main", "steps while a size is compiled in the background"),
    "blocks": Case("benchmarks.blocks:main", "block models: whole generations of equal requests"),
    "causal": Case("benchmarks.causal:main", "causal models: time to a first token, and of a token"),
    "causal_long": Case("benchmarks.causal_long:main", "causal prompts beyond the KV pool"),
    "cached_long": Case("benchmarks.cached_long:main", "requests with a dual cache beyond the KV pool"),
    "causal_agreement": Case("benchmarks.causal_agreement:main", "causal models: greedy tokens in 16 bits"),
    "prefilling": Case("benchmarks.prefilling:main", "questions over long contexts, by stage"),
    "simulate": Case("benchmarks.recorded_trace:main", "the scheduler under a recorded load, without a card"),
    "trace_picture": Case("benchmarks.trace_picture:main", "a picture of some tenths of a second of traces"),
    "replicas": Case("benchmarks.replicas:main", "many replicas behind a router, without a card"),
    "phases": Case("benchmarks.phases:main", "what phase multiplexing is worth, without a card"),
    "serving": Case("benchmarks.serving:main", "a served model under load, over HTTP"),
    "short_request": Case("benchmarks.short_request:main", "a short request beside long ones, over HTTP"),
    "static_batcher": Case("benchmarks.static_batcher:main", "a server of static batches, for `serving`"),
    "card": Case("benchmarks.card_report:main", "what a card does with each kind of kernels, to send in"),
    "step": Case("benchmarks.steps.full:main", "a full step, beside torch and plain JAX"),
    "cached_step": Case("benchmarks.steps.cached:main", "a step of a block against cached rows"),
    "cards": Case("benchmarks.steps.cards:main", "both steps on one card and on several"),
    "profile": Case("benchmarks.steps.profile:main", "where the time of a step goes, by kernel"),
    "parts": Case("benchmarks.steps.parts:main", "where the time of an engine's parts goes, by kernel"),
    "masked_logits": Case("benchmarks.operators.masked_logits:main", "head with reductions"),
    "attention": Case("benchmarks.operators.attention:main", "packed attention, beside cuDNN and tokamax"),
    "split_attention": Case("benchmarks.operators.split_attention:main", "attention over the KV pool"),
    "grouped_matmul": Case("benchmarks.operators.grouped_matmul:main", "products of experts"),
    "skinny_matmul": Case("benchmarks.operators.skinny_matmul:main", "products of few rows"),
    "quantised_matmul": Case(
        "benchmarks.operators.quantised_matmul:main", "products of many rows with weights in few bits"
    ),
    "exchange": Case("benchmarks.operators.exchange:main", "sums over cards of few rows"),
    "triton_sizes": Case("benchmarks.operators.triton_sizes:main", "sizes of Triton's kernels for a card"),
    "triton_compiled": Case("benchmarks.operators.triton_compiled:main", "what they take of any card"),
    "plan": Case("benchmarks.planning.parts:main", "what fits, how fast it plans, whether a card agrees"),
    "plan_peak": Case("benchmarks.planning.card:print_peak", "the peak of one step, for `plan`"),
    "tiers": Case("benchmarks.tiers:main", "layers with host memory"),
    "offloaded": Case("benchmarks.offloaded:main", "generations with layers in host memory"),
    "quality": Case("benchmarks.quality.cells:main", "answers of the bundled model by cache and rule"),
    "block_quality": Case(
        "benchmarks.quality.block_cells:main", "answers of a block model by rule and block length"
    ),
    "company": Case("benchmarks.quality.company:main", "tokens alone against those in company"),
    "lost_in_the_middle": Case(
        "benchmarks.quality.lost_in_the_middle:main", "facts in long contexts, by length and position"
    ),
    "prefilling_quality": Case(
        "benchmarks.quality.prefilling_cells:main",
        "answers over long contexts, by single settings",
    ),
    "real_text": Case(
        "benchmarks.quality.real_text:main", "checkpoints on your own text, to compare weights"
    ),
    "rounding_error": Case(
        "benchmarks.quality.rounding_error:main", "errors of products with weights in few bits"
    ),
    "load": Case("benchmarks.checkpoints:load", "loading a checkpoint"),
    "convert": Case("benchmarks.checkpoints:convert", "converting a checkpoint and back"),
    "torch_step": Case("benchmarks.peers.torch_cases:step", "a full step in torch, for `step --peers`"),
    "torch_kernels": Case("benchmarks.peers.torch_cases:kernels", "single operators in torch"),
    "transformers_causal": Case(
        "benchmarks.peers.transformers_causal:main", "`causal` and `causal_long` in transformers"
    ),
    "results": Case("benchmarks.tables:main", "write docs/results.md and the README's figures"),
    "compile": Case("benchmarks.compile:main", "first calls: what is compiled, what is loaded"),
    "rerun": Case("benchmarks.rerun:main", "what the README quotes, measured again"),
}


def exit_code(run: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """Run a case with its options: 0, or 2 and a line on stderr for what its user has to change."""
    try:
        run(args)
    except JdllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def case_parser(case: str, description: str | None, *, records: bool = True) -> argparse.ArgumentParser:
    """A parser of a case's options; where it `records`, with `--out`, the directory for that."""
    parser = argparse.ArgumentParser(
        prog=f"python3 -m benchmarks {case}",
        description=description,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    if records:
        parser.add_argument("--out", type=Path, help="directory of the records (benchmarks/results)")
    return parser
