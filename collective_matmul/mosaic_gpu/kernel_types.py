"""Types of what the bodies of kernels handle.

Kernel bodies are traced, or simulated by tests, so references and scalars have no static types of
their own. The aliases below say which of them an argument is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

#: A reference to an array in global or shared memory, or to barriers.
Ref = Any
#: An int, or an int32 scalar of a warpgroup.
Scalar = Any
#: See `PersistentGemm.multiply`.
InParts = Callable[[Callable[[Scalar, Scalar, Any], Any], Any], Any]


class TileCoord(NamedTuple):
    """One of the tiles of the results that a block computes.

    Attributes:
      tile_idx: number of the tile in the sequence of this block's tiles.
      batch: batch of the results that the tile is in.
      row: first row of the block's tile.
      cluster_n: position of the cluster's tile along n, counted through the columns of all results.
    """

    tile_idx: Scalar
    batch: Scalar
    row: Scalar
    cluster_n: Scalar


class TilePart(NamedTuple):
    """The part of every tile that one MMA warpgroup multiplies, as large as `warpgroup_tile`.

    Attributes:
      row_offset: rows of the tile above the part.
      column_offset: columns of the tile before the part.
    """

    row_offset: Scalar
    column_offset: Scalar


class Stages(NamedTuple):
    """The pipeline between the load warpgroup and the MMA warpgroups: a ring of stages.

    Step s uses stage ``s % max_concurrent_steps``. Steps are counted through all tiles of a block.

    Attributes:
      x: shared memory for k-blocks of x, [stages, tile_m, tile_k]; [stages, tile_k, tile_m] if x is
        transposed.
      w: shared memory for k-blocks of w, [stages, tile_k, tile_n]; [stages, tile_n, tile_k] if w is
        transposed.
      full: one barrier for each stage: both k-blocks have arrived.
      empty: one barrier for each stage: all readers, those of the whole cluster, are done with it.
    """

    x: Ref
    w: Ref
    full: Ref
    empty: Ref


class PipelineStep(NamedTuple):
    """A step of a block.

    Attributes:
      number: counted through all tiles of the block.
      stage: the one that it uses.
    """

    number: Scalar
    stage: Scalar


class KBlockLoad(Protocol):
    """How the load warpgroup brings an operand's k-blocks into shared memory."""

    def start(self, plane: Scalar, k_block: Any, step: PipelineStep, full: Ref) -> None:
        """Starts to load a k-block, whose stage is empty.

        Args:
          plane: the contracted plane.
          k_block: the range of the contracted axis.
          step: the step that the k-block is for.
          full: barriers. That of the stage has one arrival more once the k-block is there.
        """


class Operands(NamedTuple):
    """References to what a matmul reads.

    Attributes:
      indices: planes of the operands, see `Operand.index`.
      xs: one reference for each term p. Kernels that communicate have more here.
      ws: ws[p][q] is multiplied with xs[p] in result q.
    """

    indices: Ref
    xs: Any
    ws: list[list[Ref]]
