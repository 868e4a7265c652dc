"""A stream of denoising steps, for who draws them."""

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import numpy as np

from jdllm.api.answers import DONE, Pieces, event, infill_usage, prefilled, usage, way_of
from jdllm.api.errors import ApiError
from jdllm.api.running import Running
from jdllm.outputs import CompletionOutput
from jdllm.serving.request import Request
from jdllm.serving.spec import RequestSpec
from jdllm.serving.updates import StepUpdate

Further = Callable[[int, CompletionOutput], dict[str, Any]]
"""What the last event of a sample has beside the usual, from its index and its output."""


async def denoise_events(
    running: Running, pieces: Pieces, ignored: Mapping[str, Any], further: Further = lambda *_: {}
) -> AsyncGenerator[bytes]:
    """Events `start`, `step` and `end` of every sample of a call, and `error` where it fails.

    Arguments:
    - `running`: the call, submitted with updates of every step.
    - `pieces`: texts of tokens.
    - `ignored`: what the first events have beside the usual.
    - `further`: see `Further`.
    """
    specs = [(one.seed, spec) for one in running.asked for spec in one.specs]
    try:
        with running:
            for choice, (seed, spec) in enumerate(specs):
                yield event({**_start(running.id, choice, seed, spec, pieces), **ignored}, "start")
            async for choice, update in running:
                if isinstance(update, StepUpdate):
                    yield event(_step(choice, update, pieces), "step")
            outputs = [sample for output in running.outputs() for sample in output.outputs]
            for choice, (sample, (_, spec)) in enumerate(zip(outputs, specs, strict=True)):
                told = _end(choice, sample, running.ended(choice), spec) | further(choice, sample)
                yield event(told | prefilled(sample, spec, pieces.tokenizer), "end")
    except ApiError as error:
        yield event(error.body(), "error")
    yield DONE


def _start(call: str, choice: int, seed: int, spec: RequestSpec, pieces: Pieces) -> dict[str, Any]:
    tokens = spec.tokens.tolist()
    return {
        "index": choice,
        "id": call,
        "seed": seed,
        "prompt_token_ids": spec.prompt.tolist(),
        "texts": [None if token == spec.mask_id else pieces(token) for token in tokens],
        "length": len(tokens),
        "start": spec.returned.start,
        "stop": spec.returned.stop,
        "blocks": [[block.start, block.stop] for block in spec.blocks],
    }


def _step(choice: int, update: StepUpdate, pieces: Pieces) -> dict[str, Any]:
    tokens = update.provisional.tolist()
    return {
        "index": choice,
        "step": update.step,
        "positions": update.positions.tolist(),
        "token_ids": tokens,
        "texts": [pieces(token) for token in tokens],
        "committed": update.committed.tolist(),
        "confidence": np.exp(update.logprobs.astype(np.float64)).round(6).tolist(),
        **({} if update.settled is None else {"settled": update.settled}),
    }


def _end(choice: int, sample: CompletionOutput, ended: Request, spec: RequestSpec) -> dict[str, Any]:
    steps = ended.committed_in[spec.returned].tolist()
    return {
        "index": choice,
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "nfe": sample.nfe,
        "committed_in": [None if step < 0 else step for step in steps],
        "usage": _usage(sample, spec),
    } | way_of(sample)


def _usage(sample: CompletionOutput, spec: RequestSpec) -> dict[str, Any]:
    if len(spec.prompt) == len(spec.tokens):  # an infilling
        return infill_usage([spec.prompt.tolist()], spec.mask_id, 1, sample.nfe)
    return usage(len(spec.prompt), len(sample.token_ids), sample.nfe)
