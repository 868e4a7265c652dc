"""Greedy tokens of causal models in 16 bits: what the pool, and layers with keys in host memory, prefer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx

from benchmarks.cases import case_parser
from benchmarks.causal import prompts_of
from benchmarks.record import record
from benchmarks.shapes import CAUSAL_SHAPES
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.outputs import RequestOutput
from jdllm.serving.demands import Kind

WAYS = {"pool": "4GiB", "host": "64MiB"}
"""Where keys are, and a pool that holds all prompts, or none of them."""


def greedy(model: Transformer, way: str, prompts: list[np.ndarray], tokens: int) -> list[RequestOutput]:
    """What each prompt is continued by, read in parts of 1024 rows at most."""
    sampling = SamplingParams(max_tokens=tokens, early_stop=False)
    with LLM(model, max_num_batched_tokens=1024, kv_pool=WAYS[way], progress=False) as llm:
        outputs = llm.generate(prompt_token_ids=prompts, sampling=sampling)
        assert (llm.engine.stats().parts[Kind.LAYERED] > 0) == (way == "host")
    return outputs


def gaps(llm: LLM, prompts: list[np.ndarray], outputs: list[RequestOutput]) -> np.ndarray:
    """How far each token's logit is below the largest one, evaluated at once and without a cache."""
    found = llm.token_logprobs([(p, o.token_ids) for p, o in zip(prompts, outputs, strict=True)])
    return np.array([one.best_logprob - one.logprob for answer in found for one in answer])


def row(
    way: str, outputs: list[RequestOutput], pool: list[RequestOutput], below: np.ndarray
) -> dict[str, Any]:
    """What is recorded of a way, beside the outputs of the pool."""
    ids, others = (np.array([output.token_ids for output in found]) for found in (outputs, pool))
    return {
        "keys": way,
        "tokens": ids.size,
        "agreement": float((below == 0).mean()),
        "largest_gap": float(below.max()),
        "as_pool": float((ids == others).cumprod(axis=1).mean()),
    }


def main(arguments: Sequence[str]) -> None:
    """Greedy tokens in bfloat16 against one evaluation of prompt and tokens.

    `python3 -m benchmarks causal_agreement [--prompts 8] [--length 3000] [--tokens 64]` on a card, with
    random weights, whose logits are closer to each other than a trained model's. `agreement` is the share of
    tokens that the evaluation prefers too, `largest_gap` how far a token's logit is below the largest one at
    most, `as_pool` the share of tokens, up to the first other one, that are the pool's.
    """
    parser = case_parser("causal_agreement", main.__doc__)
    parser.add_argument("--shape", choices=CAUSAL_SHAPES, default="llama-3.1-8b")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--length", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args(arguments)
    model = Transformer(CAUSAL_SHAPES[args.shape], rngs=nnx.Rngs(0), dtype="bfloat16")
    prompts = prompts_of(CAUSAL_SHAPES[args.shape], args.prompts, args.length, 0)
    found = {way: greedy(model, way, prompts, args.tokens) for way in WAYS}
    with LLM(model, max_num_batched_tokens=8192, kv_pool="64MiB", progress=False) as llm:
        table = [
            row(way, outputs, found["pool"], gaps(llm, prompts, outputs)) for way, outputs in found.items()
        ]
    record(f"causal_agreement_{args.shape}", table, args.out, length=args.length)
