"""Train the demo model: `python -m jdllm.demo.train --out DIR`.

Needs optax (the `train` extra). All bundled checkpoints were trained by this script on one H200: with
`--model retrieval` it goes on from the demo model to one that finds facts in long contexts, for
`jdllm.decoding.prefilling`, and with `--model block` to its twin among block models, an SDAR of the same size
for the same tasks.
"""

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax import lax
from jaxtyping import Array, Float

from jdllm.checkpoints.loading import load_params
from jdllm.demo import checkpoint_path
from jdllm.demo.block_objective import block_loss
from jdllm.demo.data import (
    DEMO_BUCKETS,
    Asked,
    Batches,
    Bucket,
    make_batches,
    prefetch,
)
from jdllm.demo.export import block_hf_config, hf_config, require_free, write_checkpoint
from jdllm.demo.long_data import (
    MAX_POSITIONS,
    RETRIEVAL_BUCKETS,
    LongBatches,
    LongBucket,
    held_out,
    make_long_batches,
)
from jdllm.demo.long_objective import long_loss
from jdllm.demo.objective import denoise, dense_layout, masked_loss
from jdllm.demo.tasks import GEN_LENGTH, MAX_LENGTH, TASKS, test_instances
from jdllm.demo.tokenizer import EOS, MASK, answer_text
from jdllm.errors import JdllmError, RequestError
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import Params, init_params, is_spec, spec_tree

_EVAL_BATCH = 128
_EVAL_ROWS = _EVAL_BATCH * MAX_LENGTH
_EVAL_SEED = 3


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """What determines a training run, apart from the machine.

    - `hidden_size`, `num_layers`, `num_heads`, `intermediate_size`: of the model.
    - `block_length`: of a block model, an SDAR, whose `buckets` have whole blocks; else a LLaDA is trained.
    - `other_lengths`: of blocks, which steps have by turns with `block_length`, so that the model fills
      blocks of these lengths too.
    - `begin_with`: a LLaDA of these sizes, whose weights come first; else they are drawn. The norms of
      queries and keys, which only a block model has, begin with ones.
    - `buckets`: the examples of every step, all of one kind.
    - `max_positions`: that the configuration states.
    - `minutes`: wall-clock budget in all, compilation included and the final evaluation excluded.
    - `steps`: most optimizer steps; the learning rate follows whichever of the two budgets is further spent.
    - `steps_per_dispatch`: optimizer steps in one executable call.
    - `learning_rate`: peak, reached after 3 % of the budget and then lowered along a cosine.
    - `weight_decay`: of matrices.
    - `dtype`: of the forward and backward pass; the weights that are trained are f32.
    - `reports`: progress reports with held-out figures, evenly spread.
    - `report_instances`, `final_instances`: held-out instances of each task in a report and at the end.
    - `seed`: of weights, masks and examples.
    - `workers`: processes that draw examples.
    """

    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 8
    intermediate_size: int = 448
    block_length: int | None = None
    other_lengths: tuple[int, ...] = ()
    begin_with: Path | None = None
    buckets: tuple[Bucket | LongBucket, ...] = DEMO_BUCKETS
    max_positions: int = 2 * MAX_LENGTH
    minutes: float = 8.0
    steps: int = 1_000_000
    steps_per_dispatch: int = 8
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    dtype: str = "bfloat16"
    reports: int = 12
    report_instances: int = _EVAL_BATCH
    final_instances: int = 1000
    seed: int = 0
    workers: int = dataclasses.field(default_factory=lambda: max((os.cpu_count() or 1) - 2, 1))

    def hf_config(self) -> dict[str, Any]:
        """The `config.json` of the model."""
        sizes = self.hidden_size, self.num_layers, self.num_heads, self.intermediate_size, self.max_positions
        return hf_config(*sizes) if self.block_length is None else block_hf_config(*sizes, self.block_length)

    def first_weights(self) -> Params:
        """The weights before the first step, f32."""
        drawn = init_params(config_from_hf(self.hf_config()), jax.random.key(self.seed), "float32")
        if self.begin_with is None:
            return drawn
        llada = config_from_hf(dataclasses.replace(self, block_length=None).hf_config())
        loaded = load_params(self.begin_with, llada, "float32")
        return {**loaded, "layers": {**drawn["layers"], **loaded["layers"]}}

    def held_out(self, count: int) -> dict[str, list[Asked]]:
        """`count` questions of each kind that training never sees."""
        buckets = self._buckets()
        if buckets is None:
            return held_out(count, _EVAL_SEED)
        used = {name for bucket in buckets for name, _ in bucket.mixture}
        return {
            task: [Asked.plainly(instance) for instance in test_instances(task, count, _EVAL_SEED)]
            for task in TASKS
            if task in used
        }

    def make_batches(self) -> Callable[[int], Batches | LongBatches]:
        """What draws the batches of a dispatch."""
        buckets = self._buckets()
        if buckets is None:
            return functools.partial(
                make_long_batches, self.long_buckets(), self.steps_per_dispatch, self.seed
            )
        return functools.partial(make_batches, buckets, self.steps_per_dispatch, self.seed)

    def long_buckets(self) -> tuple[LongBucket, ...]:
        """The buckets of long contexts."""
        return tuple(bucket for bucket in self.buckets if isinstance(bucket, LongBucket))

    def _buckets(self) -> tuple[Bucket, ...] | None:
        """The buckets, if these are not the buckets of long contexts."""
        return tuple(bucket for bucket in self.buckets if isinstance(bucket, Bucket)) or None


SETTINGS: dict[str, TrainSettings] = {
    "demo": TrainSettings(),
    "block": TrainSettings(
        begin_with=checkpoint_path(), block_length=8, other_lengths=(1, 4), learning_rate=5e-4
    ),
    "retrieval": TrainSettings(
        begin_with=checkpoint_path(),
        buckets=RETRIEVAL_BUCKETS,
        max_positions=MAX_POSITIONS,
        learning_rate=5e-4,
        reports=6,
        report_instances=64,
        final_instances=256,
    ),
}
"""By the name of the model."""


class TrainState(NamedTuple):
    params: Params
    optimizer: Any
    key: Array


@dataclasses.dataclass(frozen=True)
class TrainReport:
    """What a run did.

    - `steps`: optimizer steps.
    - `losses`: mean loss of each dispatch, in nats per response token.
    - `exact`: share of held-out instances that the written weights, loaded as f32, answer exactly with one
      token per step.
    - `seconds`: wall time, without the final evaluation.
    """

    steps: int
    losses: list[float]
    exact: dict[str, float]
    seconds: float


def make_optimizer(config: ModelConfig, weight_decay: float) -> optax.GradientTransformation:
    """AdamW without its learning rate: the caller scales the update. Norm weights do not decay."""
    matrices = jax.tree.map(lambda spec: spec.init_std > 0, spec_tree(config), is_leaf=is_spec)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(weight_decay, mask=matrices),
    )


def learning_rate_at(progress: Float[Array, ""], peak: float) -> Float[Array, ""]:
    """Linear warm-up over the first 3 % of the budget, then a cosine to 1 % of `peak`."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, 30, 1000, end_value=0.01 * peak)
    return jnp.asarray(schedule(1000 * progress))


@functools.partial(jax.jit, static_argnames=("config", "settings"), donate_argnums=0)
def train_steps(
    state: TrainState,
    batches: Batches | LongBatches,
    progress: Float[Array, ""],
    config: ModelConfig,
    settings: TrainSettings,
) -> tuple[TrainState, Float[Array, ""]]:
    """Run one optimizer step for each of the batches.

    Arguments:
    - `state`: donated.
    - `batches`: see `Batches` and `LongBatches`.
    - `progress`: spent share of the budget, in [0, 1].
    - `config`, `settings`: static.

    Returns the new state and the mean loss.
    """
    optimizer = make_optimizer(config, settings.weight_decay)
    rate = learning_rate_at(progress, settings.learning_rate)

    def step(state: TrainState, batch: Batches | LongBatches) -> tuple[TrainState, Array]:
        key, mask_key = jax.random.split(state.key)
        value, grads = jax.value_and_grad(_cast_loss)(state.params, config, settings, batch, mask_key)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        return TrainState(params, optimizer_state, key), value

    state, losses = lax.scan(step, state, batches)
    return state, losses.mean()


def _cast_loss(
    params: Params, config: ModelConfig, settings: TrainSettings, batch: Batches | LongBatches, key: Array
) -> Float[Array, ""]:
    cast = jax.tree.map(lambda p: p.astype(settings.dtype), params)
    arrays = {name: jnp.asarray(x, jnp.int32) for name, x in batch._asdict().items()}
    if isinstance(batch, LongBatches):
        return long_loss(cast, config, settings.long_buckets(), **arrays, key=key)
    shapes = tuple((bucket.batch, bucket.length) for bucket in settings.buckets)
    if config.block_length is not None:
        return block_loss(cast, config, shapes, **arrays, key=key)
    return masked_loss(cast, config, dense_layout(shapes), **arrays, key=key)


def exact_match(params: Params, config: ModelConfig, asked: Sequence[Asked]) -> float:
    """Share of the prompts that `denoise` answers exactly, one token per step."""
    length = -(-max(len(prompt) for prompt, _ in asked) // 32) * 32 + GEN_LENGTH
    whole = config.block_length or 1
    most = GEN_LENGTH + whole - 1
    batch = min(_EVAL_BATCH, len(asked), max(1, _EVAL_ROWS // length))
    right = 0
    for first in range(0, len(asked), batch):
        group = asked[first : first + batch]
        tokens = np.full((batch, length), EOS, np.int32)
        ends = np.full(batch, length, np.int32)
        for i, (prompt, _) in enumerate(group):
            ends[i] = -(-(len(prompt) + GEN_LENGTH) // whole) * whole
            tokens[i, : ends[i]] = prompt + [MASK] * (ends[i] - len(prompt))
        filled = np.asarray(denoise(params, config, tokens, ends, most))
        for row, (prompt, answer) in zip(filled, group, strict=False):
            response = row[len(prompt) : len(prompt) + GEN_LENGTH].tolist()
            right += answer_text(response) == answer
    return right / len(asked)


def exact_matches(
    params: Params, config: ModelConfig, settings: TrainSettings, count: int
) -> dict[str, float]:
    """`exact_match` of each kind of question on `count` that training never sees."""
    asked = settings.held_out(count)
    return {name: exact_match(params, config, questions) for name, questions in asked.items()}


def train(settings: TrainSettings, out: Path, log: Callable[[str], None] = print) -> TrainReport:
    """Train a demo model and write its checkpoint.

    Arguments:
    - `settings`: of the run.
    - `out`: the directory to create; see `write_checkpoint`.
    - `log`: takes progress lines.

    Raises `CheckpointError` where `out` exists, before anything else happens, and for a `begin_with` of other
    sizes.
    """
    require_free(out)
    began = time.monotonic()
    values = settings.hf_config()
    config = config_from_hf(values)
    params = settings.first_weights()
    log(f"{sum(p.size for p in jax.tree.leaves(params))} weights, {_describe(settings)}")
    with closing(prefetch(settings.make_batches(), settings.workers)) as source:
        params, losses, seconds = _optimise(settings, config, params, source, began, log)
    write_checkpoint(out, values, params)
    written = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), params)
    exact = exact_matches(written, config, settings, settings.final_instances)
    log(f"written to {out}; one token per step, f32, {settings.final_instances} test instances a task:")
    log(_figures(exact))
    return TrainReport(len(losses) * settings.steps_per_dispatch, losses, exact, seconds)


def _optimise(
    settings: TrainSettings, config: ModelConfig, params: Params, source: Any, began: float, log: Callable
) -> tuple[Params, list[float], float]:
    optimizer = make_optimizer(config, settings.weight_decay)
    state = TrainState(params, optimizer.init(params), jax.random.key(settings.seed + 1))
    batches = next(source)
    lengths = settings.block_length, *settings.other_lengths
    compiled = [
        train_steps.lower(state, batches, np.float32(0), one, settings).compile()
        for one in (dataclasses.replace(config, block_length=length) for length in lengths)
    ]
    ready = time.monotonic()
    log(f"ready after {ready - began:.0f} s")
    budget = max(60 * settings.minutes - (ready - began), 1e-9)
    losses: list[Array] = []
    reported = 0
    while True:
        elapsed = time.monotonic() - ready
        progress = max(len(losses) * settings.steps_per_dispatch / settings.steps, elapsed / budget)
        if int(progress * settings.reports) > reported or progress >= 1:
            reported = int(progress * settings.reports)
            log(_progress_line(settings, config, state.params, losses, elapsed, progress))
        if progress >= 1:
            break
        state, loss = compiled[len(losses) % len(compiled)](state, batches, np.float32(progress))
        losses.append(loss)
        batches = next(source)
        # One dispatch may run while the next is queued; more would make the clock meaningless.
        losses[max(len(losses) - 2, 0)].block_until_ready()
    return state.params, [float(loss) for loss in losses], time.monotonic() - began


def _progress_line(
    settings: TrainSettings,
    config: ModelConfig,
    params: Params,
    losses: list[Array],
    elapsed: float,
    progress: float,
) -> str:
    cast = jax.tree.map(lambda p: p.astype(settings.dtype), params)
    exact = exact_matches(cast, config, settings, settings.report_instances)
    steps = len(losses) * settings.steps_per_dispatch
    examples = steps * sum(bucket.batch for bucket in settings.buckets)
    recent = np.mean([float(loss) for loss in losses[-50:]]) if losses else float("nan")
    return (
        f"{progress:4.0%} step {steps} {elapsed:.0f} s {examples / max(elapsed, 1e-9):.0f} examples/s"
        f" loss {recent:.4f} | {_figures(exact)}"
    )


def _figures(exact: dict[str, float]) -> str:
    return " ".join(f"{task} {100 * share:.1f}" for task, share in exact.items())


def _describe(settings: TrainSettings) -> str:
    rows = sum(bucket.batch * bucket.length for bucket in settings.buckets)
    return (
        f"{sum(bucket.batch for bucket in settings.buckets)} examples in {rows} rows a step,"
        f" {settings.dtype}, {settings.workers} workers, at most {settings.minutes} minutes"
        f" and {settings.steps} steps"
    )


def main(
    out: Annotated[Path, typer.Option(help="Directory to create for the checkpoint.")],
    minutes: Annotated[float, typer.Option(help="Wall-clock budget, final evaluation excluded.")] = 8.0,
    steps: Annotated[int, typer.Option(help="Most optimizer steps.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="Seed of weights that are drawn, masks and examples.")] = 0,
    model: Annotated[
        Literal["demo", "block", "retrieval"],
        typer.Option(help="The demo model, its twin among block models, or the one for long contexts."),
    ] = "demo",
) -> None:
    """Train a demo model on tasks that it generates itself."""
    try:
        if minutes <= 0 or steps <= 0:
            raise RequestError(f"minutes {minutes} and steps {steps}: both must be positive")
        settings = dataclasses.replace(SETTINGS[model], minutes=minutes, steps=steps, seed=seed)
        train(settings, out, lambda line: print(line, flush=True))
    except JdllmError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
