"""What steps of a model need, whatever else its device holds."""

import dataclasses
import functools

import jax.numpy as jnp

from jdllm.chunks import TILE
from jdllm.execution.offload.tiers import HostTiers
from jdllm.execution.paged.stored_keys import gathering_bytes
from jdllm.models.config import ModelConfig
from jdllm.pallas.device import Target
from jdllm.pallas.masked_logits import Level
from jdllm.planning.buckets import head_bucket, row_bucket
from jdllm.planning.budget import StepRoom
from jdllm.planning.plan import (
    UNLIMITED,
    Bucket,
    StepPlan,
    Workload,
    bucket_of,
    longest_context,
    plan_bucket,
)

_LOGITS_ROWS = (512, 256, 128, 64, 32, 16)
"""Head rows whose logits may exist at a time in refreshes and reuses, the most first."""

_MARGIN = 16


@dataclasses.dataclass(frozen=True)
class StepNeeds:
    """What steps of one model need, whatever else the device holds."""

    config: ModelConfig
    dtype: str
    device: Target
    max_num_logits: int | None
    tiers: tuple[HostTiers, ...]

    def workload(self, level: Level) -> Workload:
        """Full steps that evaluate every row."""
        return Workload(self.config, self.dtype, self.device, 1.0, level, max_num_logits=self.max_num_logits)

    def logits_rows(self, rows: int) -> int:
        """Head rows whose logits exist at a time in a step of `rows` rows that no plan cuts."""
        if self.max_num_logits is not None:
            return self.max_num_logits
        least = _whole(self, rows, _LOGITS_ROWS[-1])
        return next(count for count in _LOGITS_ROWS if _whole(self, rows, count) <= least)

    def whole(self, rows: int) -> int:
        """Bytes of a step of `rows` rows in which no operator of a layer is cut, whatever is sampled."""
        whole = _whole(self, rows, self.logits_rows(rows))
        return max(whole, self._gathering(rows)) if self.config.in_parts else whole

    def whole_with_margin(self, rows: int) -> int:
        """`whole` and a sixteenth more, by which a compiled step may differ from its plan."""
        whole = self.whole(rows)
        return whole + whole // _MARGIN

    def _gathering(self, rows: int) -> int:
        """Bytes of a part of a prompt that sees stored keys: with few rows the gathered keys take most."""
        config, itemsize = self.config, jnp.dtype(self.dtype).itemsize
        widths = 2 * config.hidden_size + 3 * config.num_heads * config.head_dim
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        return rows * widths * itemsize + gathering_bytes(rows, *heads, itemsize)

    def refresh(self, bucket: Bucket, room: StepRoom, level: Level) -> StepPlan:
        """The plan of a refresh of one sequence, which is cut to fit.

        Arguments:
        - `bucket`: the compiled sizes.
        - `room`: what the refresh may use; a compiled one may need up to a sixteenth more than its plan.
        - `level`: what the head computes for a row.
        """
        most = self.max_num_logits or _LOGITS_ROWS[0]
        workload = dataclasses.replace(self.workload(level), cache_policy="dual", max_num_logits=most)
        return plan_bucket(workload, bucket, room._replace(device=room.device * _MARGIN // (_MARGIN + 1)))

    def refresh_fits(self, rows: int, room: StepRoom) -> bool:
        """Whether a refresh of one sequence of so many rows fits, whatever is sampled."""
        return _refresh_fits(self, rows, room.device)

    def full(self, rows: int, room: StepRoom) -> int:
        """Bytes of a full step of `rows` rows that is cut to fit, whatever is sampled."""
        return max(
            plan_bucket(self.workload(level), whole_bucket(rows), room, self.tiers).step_bytes
            for level in Level
        )

    def fits_on_device(self, context: int, room: StepRoom) -> bool:
        """Whether full steps of so many tokens fit at every level."""
        workloads = map(self.workload, Level)
        return all(plan_bucket(one, bucket_of(one, context), room).fits for one in workloads)

    def longest_on_device(self, room: StepRoom) -> int:
        """The longest context that fits at every level; 0 where none does."""
        return _longest_on_device(self, room.device)

    def longest(self, room: StepRoom) -> int:
        """The longest context that fits by the default workload, with host memory; 0 where none does."""
        workload = Workload(self.config, self.dtype, self.device, max_num_logits=self.max_num_logits)
        return longest_context(workload, room, self.tiers)


@functools.lru_cache(maxsize=4096)
def _whole(needs: StepNeeds, rows: int, logits_rows: int) -> int:
    """`StepNeeds.whole` with so many rows of logits at a time; the same rows are asked for repeatedly."""
    workloads = (
        dataclasses.replace(needs.workload(level), cache_policy="dual", max_num_logits=logits_rows)
        for level in Level
    )
    return max(plan_bucket(workload, whole_bucket(rows), UNLIMITED).step_bytes for workload in workloads)


@functools.lru_cache(maxsize=4096)
def _refresh_fits(needs: StepNeeds, rows: int, device: int) -> bool:
    """`StepNeeds.refresh_fits` with so many bytes of the device; the same ones are asked for repeatedly."""
    room, bucket = StepRoom(device), whole_bucket(rows)
    return all(needs.refresh(bucket, room, level).fits for level in Level)


@functools.lru_cache(maxsize=4096)
def _longest_on_device(needs: StepNeeds, device: int) -> int:
    """`StepNeeds.longest_on_device` with so many bytes of the device; these are asked for repeatedly."""
    return min(longest_context(needs.workload(level), StepRoom(device)) for level in Level)


def compiled_rows(rows: int) -> int:
    """The rows that are planned for a step of `rows`: its bucket, in whole tiles."""
    return max(row_bucket(rows), -(-rows // TILE) * TILE)


def whole_bucket(rows: int) -> Bucket:
    """A step of `rows` rows beside a pool, all of which may meet the head."""
    rows = compiled_rows(rows)
    return Bucket(0, rows, head_bucket(rows))
