"""Every way in which a model generates, in one budget: what fits, how long it takes, and what is cut."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jdllm.decoding.prefilling import Prefilling
from jdllm.decoding.registry import NO_CACHE, POLICIES
from jdllm.errors import DoesNotFitError
from jdllm.planning.account import Account
from jdllm.planning.answer import Report, make_report, taking_of, without_host
from jdllm.planning.blocks import BlocksPlan, plan_blocks
from jdllm.planning.buckets import row_bucket
from jdllm.planning.causal import CausalPlan, plan_causal
from jdllm.planning.ladder import MAX_SEGMENTS, denoising_tile_rows, make_ladder
from jdllm.planning.layered import CACHES
from jdllm.planning.plan import row_ladder
from jdllm.planning.prefilling import LongPlan, Question
from jdllm.planning.question import StepQuestion
from jdllm.planning.room import Options
from jdllm.planning.search import largest
from jdllm.planning.sharing import pages_of

REQUESTS = (1024, 4096, 16384)
"""Tokens of the requests that are counted, of which as many as fit run at once."""

EXACT, PREFILLING, PREFILL, DECODE, BLOCKS = "exact", "prefilling", "prefill", "decode", "blocks"

_QUESTION = 131072
"""Tokens of a context that is prefilled, where nobody says how many and any number fits."""


class Way(NamedTuple):
    """One way to generate in one budget.

    - `name`: "exact", a cache policy or "prefilling"; of causal models "prefill" and "decode", of block
      models "prefill" and "blocks".
    - `longest`: tokens of the longest context, 0 where none fits; `plan.LONGEST` where any number does.
    - `on_device`: the same without host memory.
    - `at_once`: how many requests of so many tokens run together, by their tokens, in an engine that is asked
      for them; empty for a part of a way.
    - `context`, `step`: the tokens that were planned, and what `seconds` are of.
    - `fits`: whether this context does; otherwise nothing below says anything.
    - `seconds`, `measured`: an estimate, and whether it is at rates that were measured; otherwise it is a
      bound.
    - `host_bytes`: of host memory; `link_seconds`: of `seconds`, what transfers from there take.
    - `cut`: what is away in host memory, and what is cut into how many chunks, in words.
    - `options`: what `LLM` has to be asked for, so that it takes this context.
    """

    name: str
    longest: int
    on_device: int
    at_once: Mapping[int, int]
    context: int
    step: str
    fits: bool
    seconds: float = 0.0
    measured: bool = False
    host_bytes: int = 0
    link_seconds: float = 0.0
    cut: tuple[str, ...] = ()
    options: Options = MappingProxyType({})


def every_way(asked: StepQuestion, prefilling: Prefilling, question: Question) -> list[Way]:
    """All ways of the model of a question, each with the context that was asked for, or its longest.

    Arguments:
    - `asked`: its retention is for the cache policies that use one, and its cache policy does not matter.
    - `prefilling`, `question`: how long contexts are prepared, and a question over one, whose own context
      does not matter.
    """
    try:
        engine = asked.engine()
    except DoesNotFitError:  # a size that was asked for: `LLM` would not start
        engine = None
    config = asked.workload.config
    if config.in_order:
        return list(_causal(asked, engine))
    if config.in_parts:
        return list(_blocks(asked, engine))
    exact = _denoising(_with(asked, NO_CACHE, None), EXACT, engine)
    return [exact, *_caches(asked, engine), _long(asked, engine, prefilling, question)]


def _caches(asked: StepQuestion, engine: Account | None) -> Iterator[Way]:
    """Each cache policy; those that store as many rows, and may run layer by layer or not, need the same."""
    found: dict[tuple[bool, bool], Way] = {}
    for name, policy in POLICIES.items():
        kind = policy.scored, name in CACHES
        if kind not in found:
            retention = asked.workload.retention if policy.scored else None
            found[kind] = _denoising(_with(asked, name, retention), name, engine)
        yield found[kind]._replace(name=name)


def _with(asked: StepQuestion, cache: str, retention: float | None) -> StepQuestion:
    workload = dataclasses.replace(asked.workload, cache_policy=cache, retention=retention)
    return dataclasses.replace(asked, workload=workload)


def _nothing(name: str, context: int | None) -> Way:
    return Way(name, 0, 0, {}, context or 0, "", fits=False)


def _denoising(asked: StepQuestion, name: str, engine: Account | None) -> Way:
    """A full step, or a refresh of a cache."""
    if engine is None:
        return _nothing(name, asked.context)
    report = make_report(asked)
    count = _cached_at_once if asked.workload.caches else _whole_at_once
    at_once = {tokens: count(asked, engine, tokens) for tokens in REQUESTS}
    found, fits = report.plan, report.refusal is None
    longest, on_device = report.longest.context, report.on_device.context
    way = Way(name, longest, on_device, at_once, found.context, "", fits, options=report.options)
    if not fits:
        return way
    time = report.time
    return way._replace(
        step="refresh" if asked.workload.caches else "full step",
        seconds=time.seconds,
        measured=time.measured,
        host_bytes=report.host_bytes,
        link_seconds=time.link_seconds,
        cut=(*_away(report), *_cut(report)),
    )


def _away(report: Report) -> Iterator[str]:
    """What of a step is in host memory."""
    found = report.plan
    if report.engine is not None and (found.streamed_bytes or report.layered is not None):
        yield from _layers_away(report.engine)
    if found.tiers is not None:
        yield f"{' and '.join(found.host_tiers)} away"
    if report.layered is not None:
        yield from _keys_away(report.workload.config.num_layers - report.layered.layering.kept)


def _cut(report: Report) -> Iterator[str]:
    """Into how many chunks operators are cut."""
    if report.layered is not None:
        yield f"{report.layered.layering.chunk} rows at a time"
        return
    yield from (f"{part} {count}" for part, count in vars(report.plan.chunks).items() if count > 1)


def _layers_away(engine: Account) -> tuple[str, ...]:
    return (f"{engine.offloaded} layers away",) if engine.offloaded else ()


def _whole_at_once(asked: StepQuestion, engine: Account, tokens: int) -> int:
    """Whole sequences of so many tokens that share a step; a longer one is alone."""
    report = make_report(dataclasses.replace(asked, context=tokens))
    if report.refusal is not None or report.engine is None:
        return 0
    most = report.engine.rows
    ladder = make_ladder(most, tile_rows=denoising_tile_rows(shifted=asked.workload.config.logits_shift))
    rows = tokens if tokens <= most else row_bucket(tokens)
    return min(MAX_SEGMENTS, max(1, ladder.shared_rows(most) // rows))


def _cached_at_once(asked: StepQuestion, engine: Account, tokens: int) -> int:
    """Requests with a cache whose pages the pool has; one that runs layer by layer is alone."""
    taking = taking_of(asked, engine, tokens)
    if taking is None or taking.layered is not None:
        return int(taking is not None)
    return _in_pool(taking.engine, asked.workload.stored_rows(tokens))


def _in_pool(engine: Account, stored: int) -> int:
    """Requests of so many stored rows that run at once."""
    return min(MAX_SEGMENTS, (engine.pages - 1) // pages_of(stored))


def _long(asked: StepQuestion, engine: Account | None, prefilling: Prefilling, question: Question) -> Way:
    """A question over a long context."""
    if engine is None:
        return _nothing(PREFILLING, asked.context)

    def plan(context: int, engine: Account = engine) -> LongPlan:
        over = dataclasses.replace(question, context=context)
        return LongPlan(asked.workload, engine, asked.card.target, prefilling, over)

    def most(engine: Account) -> int:
        return largest(lambda context: plan(context, engine).lacking is None, row_ladder()) or 0

    def count(tokens: int) -> int:
        one = plan(tokens)
        return 0 if one.lacking is not None else min(MAX_SEGMENTS, (engine.pages - 1) // one.pages)

    longest = most(engine)
    context = asked.context or max(1, min(longest, _QUESTION))
    found, chunks = plan(context), -(-context // prefilling.chunk_length)
    at_once, fits = {tokens: count(tokens) for tokens in REQUESTS}, found.lacking is None
    way = Way(PREFILLING, longest, _on_device(asked, engine, most), at_once, context, "", fits)
    if not fits:
        return way
    return way._replace(
        step="question",
        seconds=found.seconds,
        measured=found.measured,
        host_bytes=engine.streamed,
        link_seconds=found.transfer_seconds,
        cut=(*_layers_away(engine), f"{prefilling.kept_of(chunks)} of {chunks} chunks kept"),
    )


def _causal(asked: StepQuestion, engine: Account | None) -> Iterator[Way]:
    """A prompt, and a token behind it."""
    if engine is None:
        yield from (_nothing(name, asked.context) for name in (PREFILL, DECODE))
        return
    workload = asked.workload

    def plan(prompt: int | None, account: Account = engine) -> CausalPlan:
        return plan_causal(workload, account, asked.card.target, prompt)

    def count(tokens: int) -> int:
        return _in_pool(engine, tokens) or int(plan(tokens - 1).fits)

    found = plan(asked.context)

    cut, read, generated = _layers_away(engine), 0, 0
    if found.layered is not None:
        layers, layering = workload.config.num_layers, found.layered.layering
        read, generated = (layers - kept for kept in (layering.kept, layering.kept_behind))
    on_device = _on_device(asked, engine, lambda engine: plan(None, account=engine).longest)
    longest = max(found.longest, found.longest_layered)
    way = Way(PREFILL, longest, on_device, {}, found.prompt, "", found.fits)
    prompt = way._replace(
        step="prompt",
        seconds=found.prefill_seconds,
        measured=found.prefill_measured,
        host_bytes=found.host_bytes,
        link_seconds=found.prefill_transfer_seconds,
        cut=(*cut, *_keys_away(read)),
    )
    token = way._replace(
        step="token",
        seconds=found.token_seconds,
        measured=found.token_measured,
        host_bytes=found.host_bytes,
        link_seconds=found.transfer_seconds,
        cut=(*cut, *_keys_away(generated)),
    )
    at_once = {tokens: count(tokens) for tokens in REQUESTS}
    yield prompt if found.fits else way
    yield (token if found.fits else way)._replace(name=DECODE, at_once=at_once)


def _on_device(asked: StepQuestion, engine: Account, longest: Callable[[Account], int]) -> int:
    """The longest context without host memory.

    Arguments:
    - `longest`: of an engine.
    """
    alone = without_host(asked, engine)
    return 0 if alone is None else longest(alone[1])


def _keys_away(layers: int) -> tuple[str, ...]:
    return (f"keys of {layers} away",) if layers else ()


def _blocks(asked: StepQuestion, engine: Account | None) -> Iterator[Way]:
    """A prompt, and an evaluation of a block behind it."""
    if engine is None:
        yield from (_nothing(name, asked.context) for name in (PREFILL, BLOCKS))
        return

    def plan(context: int | None, account: Account = engine) -> BlocksPlan:
        return plan_blocks(asked.workload, account, asked.card.target, context)

    found = plan(asked.context)
    on_device = _on_device(asked, engine, lambda engine: plan(None, account=engine).longest)
    way = Way(PREFILL, found.longest, on_device, {}, found.prompt, "", found.fits)
    shared = {"host_bytes": engine.streamed, "cut": _layers_away(engine)}
    prompt = way._replace(
        step="prompt",
        seconds=found.prefill_seconds,
        measured=found.measured,
        link_seconds=found.prefill_transfer_seconds,
        **shared,
    )
    block = way._replace(
        step="block",
        seconds=found.evaluation_seconds,
        link_seconds=found.transfer_seconds,
        **shared,
    )
    at_once = {tokens: _in_pool(engine, max(1, tokens - found.block_length)) for tokens in REQUESTS}
    yield prompt if found.fits else way
    yield (block if found.fits else way)._replace(name=BLOCKS, at_once=at_once)
