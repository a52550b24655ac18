"""The walk over the tiles of a product that devices sum up, and who owns which of them.

Each device walks over all tiles: first those without an own row, beginning with the rows behind its
own, then those that have some. `scatter_kernel` says what it does at each.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu

from collective_matmul.kernels.matmul_kernel import BLOCK_AXES, Work
from collective_matmul.kernels.operands import Operand
from collective_matmul.kernels.scatter_plan import Plan

# Its annotations are narrower than what it takes and exports.
plgpu: Any = mosaic_gpu


class OwnersWalk(Work):
    """A matmul whose tiles have owners. Batches are the planes of x."""

    def __init__(self, plan: Plan, axis_name: str, xs, ws):
        shapes = plan.shapes
        product = jax.ShapeDtypeStruct(
            (shapes.planes, shapes.all_rows, shapes.columns), xs[0].dtype
        )
        x_operands = [Operand(x, 2, per_batch=1) for x in xs]
        w_operands = [[Operand(w, shapes.w_contracted)] for w in ws]
        super().__init__(x_operands, w_operands, [product], shapes.planes, 1, plan.tiles)
        self.plan = plan
        self.shapes = shapes
        self.axis_name = axis_name

    def walk(self, visit) -> None:
        """Calls ``visit(turn, batch, row, across)`` for each of this block's tiles."""
        tiles = self.batch * self.down * self.across

        @plgpu.nd_loop((tiles,), collective_axes="cluster")
        def _(info):
            visit(info.local_index, *self.locate(info.local_index))

    def locate(self, turn) -> tuple[Any, Any, Any]:
        """The batch, the row and the place across of a tile; those with own rows come last."""
        plan = self.plan
        index = turn * lax.axis_size("cluster") + lax.axis_index("cluster")
        own = index >= plan.foreign_tiles
        height = jnp.where(own, plan.own_down, plan.down - plan.own_down)
        index = jnp.where(own, index - plan.foreign_tiles, index)
        batch, index = lax.div(index, height * plan.across), lax.rem(index, height * plan.across)
        down, across = plgpu.planar_snake(index, (height, plan.across), 0, plan.tiles.sweep_width)
        me = lax.axis_index(self.axis_name)
        first = lax.div(self.first_row(me), plan.cluster_rows)
        down = lax.rem(first + jnp.where(own, 0, plan.own_down) + down, plan.down)
        down = plan.tiles.cluster[0] * down + lax.axis_index(BLOCK_AXES[0])
        return batch, down * plan.tiles.rows, across

    def foreign_turns(self) -> Any:
        """How many of this block's tiles have no own row."""
        clusters = lax.axis_size("cluster")
        return lax.div(self.plan.foreign_tiles - lax.axis_index("cluster") + clusters - 1, clusters)

    def first_step(self, turn) -> Any:
        """How many steps come before a tile's: those with own rows take more."""
        own = jnp.maximum(turn - self.foreign_turns(), 0)
        return turn * self.steps + own * self.plan.partial_steps

    def first_row(self, owner) -> Any:
        """Of those that a device owns."""
        return 0 if self.shapes.kind == "one_shot" else owner * self.shapes.rows

    def owns(self, owner, row) -> Any:
        """Whether a device owns rows of the block's tile at `row`."""
        first = self.first_row(owner)
        return (row < first + self.shapes.rows) & (row + self.tiles.rows > first)

    def number(self, owner, batch, row, across) -> Any:
        """Which of an owner's tiles this is."""
        down = lax.div(jnp.maximum(row - self.first_row(owner), 0), self.tiles.rows)
        across = self.tiles.cluster[1] * across + lax.axis_index(BLOCK_AXES[1])
        return (batch * self.plan.row_tiles + down) * self.plan.column_tiles + across

    def column(self, across) -> Any:
        """Where a tile begins."""
        across = self.tiles.cluster[1] * across + lax.axis_index(BLOCK_AXES[1])
        return across * self.tiles.columns
