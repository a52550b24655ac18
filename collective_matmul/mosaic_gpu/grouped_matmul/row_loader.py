"""Loads of rows that TMA cannot make, as a `KBlockLoad`: by index, or with rows masked."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from collective_matmul.mosaic_gpu.grouped_matmul.row_copies import (
    RowRange,
    start_copy_of_rows,
    wait_for_copies,
)
from collective_matmul.mosaic_gpu.kernel_types import PipelineStep, Ref, Scalar

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu

#: Steps for which the load warpgroup has copies in flight before it waits for the first of them.
IN_FLIGHT = 2
#: The fewest pipeline stages. An MMA warpgroup frees a stage when it begins the next step, whose
#: copies must have come by then.
LEAST_STAGES = IN_FLIGHT + 2


class IndexedRows(NamedTuple):
    """Loads k-blocks of rows [rows, K] by index.

    The copies of a step are waited for `IN_FLIGHT` steps later, and `finish` waits for the last.

    Attributes:
      x: [S, K] in global memory.
      index: int32 [M], or None.
      rows: of the tile.
      stages: shared memory to copy to, [stages, rows, columns].
      interpreted: whether this runs in Pallas' interpreter.
    """

    x: Ref
    index: Ref | None
    rows: RowRange
    stages: Ref
    interpreted: bool

    def start(self, plane: Scalar, k_block: Any, step: PipelineStep, full: Ref) -> None:
        """Starts the copies of a step, and completes those of an earlier one."""
        del plane
        to = self.stages.at[step.stage]
        options = {
            "clips": self.x.shape[1] % k_block.size != 0,
            "interpreted": self.interpreted,
        }
        start_copy_of_rows(self.x, self.index, self.rows, k_block.start, to, **options)
        arrive_later(step.number, full, self.stages.shape[0])


def arrive_later(number: Scalar, full: Ref, stages: int) -> None:
    """Waits for the copies of the step `IN_FLIGHT` before this one, which are then there.

    Args:
      number: the step whose copies were started last.
      full: the stages' barriers.
      stages: their number.
    """

    @pl.when(number >= IN_FLIGHT)
    def _() -> None:
        wait_for_copies(IN_FLIGHT)
        plgpu.barrier_arrive(full.at[lax.rem(number - IN_FLIGHT, stages)])


def finish(steps: Scalar, full: Ref, stages: int) -> None:
    """Waits for the copies of the last steps, of this many."""
    wait_for_copies(0)

    @pl.loop(jnp.maximum(steps - IN_FLIGHT, 0), steps)
    def _(number: Scalar) -> None:
        plgpu.barrier_arrive(full.at[lax.rem(number, stages)])
