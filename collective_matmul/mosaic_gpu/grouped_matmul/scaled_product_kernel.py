"""The GEMM over groups of rows with operands in 8 bits and their scales.

`GroupedGemm` with the multiplication of `scaled_kernel`. Scales of rows are in the order of sorted
rows, also where rows are read by index: they are few bytes, and a warpgroup reads those of its rows
from one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from collective_matmul.mosaic_gpu.grouped_matmul.product_kernel import GroupedGemm
from collective_matmul.mosaic_gpu.hopper_matmul.operands import Operand
from collective_matmul.mosaic_gpu.hopper_matmul.scaled_kernel import (
    ScaledMultiplication,
    load_row_scales,
)
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import Tiling
from collective_matmul.mosaic_gpu.kernel_types import Ref, Scalar, TileCoord, TilePart


class ScaledGroupedGemm(ScaledMultiplication, GroupedGemm):
    """The body of the kernel: `GroupedGemm` of operands in 8 bits.

    Scales of rows are float32 [steps, rows, 1], or [1, rows, 1] of whole rows, with a tile's rows
    more than results have. `w_scales` are those of each group.
    """

    def __init__(
        self,
        xs: Sequence[Operand],
        ws: Sequence[Sequence[Operand]],
        outs: Sequence[Any],
        tiling: Tiling,
        *,
        indexed: bool,
        interpreted: bool,
        in_blocks: bool,
    ):
        """Describes the kernel for operands and results of these shapes; see `GroupedGemm`."""
        super().__init__(xs, ws, outs, tiling, indexed=indexed, interpreted=interpreted)
        self.in_blocks = in_blocks
        # Set in `run`.
        self.x_scales: Ref = None

    def run(self, indices: Ref, *refs: Ref) -> None:
        """Executes one warpgroup; refs are both scales, and those of `GroupedGemm`."""
        self.x_scales, self.w_scales = refs[:2]
        super().run(indices, *refs[2:])

    def w_scales_of(self, tile: TileCoord) -> Ref:
        """Returns the scales of the matrix of a tile's group."""
        return self.w_scales.at[tile.batch]

    def read_x_scales(self, tile: TileCoord, part: TilePart, step: Scalar) -> jax.Array:
        """Returns the scales [64] of a step's k-block of x, or of whole rows for step 0."""
        return load_row_scales(self.x_scales, step, tile.row + part.row_offset, 0)
