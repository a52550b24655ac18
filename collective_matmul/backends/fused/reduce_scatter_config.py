"""How the kernels that multiply and sum over devices are cut: who owns what, tile by tile."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from collective_matmul.backends.fused.config_search import (
    ARRIVAL_MICROSECONDS,
    LINK_BYTES_PER_MICROSECOND,
    SENT_BYTES_PER_MICROSECOND,
    Call,
    computing_microseconds,
    cuts,
    in_order,
    swept,
)
from collective_matmul.mosaic_gpu.tiling import (
    ITEMSIZE,
    ROW_MULTIPLE,
    SHARED_MEMORY_BYTES,
    Problem,
    Tiles,
)

#: Where sums are made. Each device makes those of the rows it owns and keeps them ("scatter"), or
#: gives them to all others too ("two_step"), or makes all of them itself ("one_shot", in the fused
#: kernel here; the collectives of that name are another kernel).
Kind = Literal["scatter", "two_step", "one_shot"]


@dataclass(frozen=True)
class Shapes:
    """What is multiplied and summed.

    Attributes:
      kind: where the sums are made.
      devices: D, on the axis.
      planes: the product of the dimensions before the scattered one.
      rows: of each plane that a device owns, a multiple of 8: of all of them for "one_shot".
      contracted: K of each term, local.
      columns: N.
      w_contracted: the axis of the weights that is summed over, counted from 1.
    """

    kind: Kind
    devices: int
    planes: int
    rows: int
    contracted: tuple[int, ...]
    columns: int
    w_contracted: Literal[1, 2] = 1

    @property
    def all_rows(self) -> int:
        """Rows of each plane of the product."""
        return self.rows * (1 if self.kind == "one_shot" else self.devices)

    @property
    def problem(self) -> Problem:
        """The matmul of all rows."""
        return Problem(
            self.planes,
            self.all_rows,
            self.contracted,
            (self.columns,),
            w_contracted=self.w_contracted,
        )


@dataclass(frozen=True)
class Plan:
    """One cut of it. Tiles are counted by clusters, which are ``tiles.cluster`` blocks each."""

    shapes: Shapes
    tiles: Tiles

    @property
    def cluster_rows(self) -> int:
        """Rows that a cluster multiplies at once."""
        return self.tiles.rows * self.tiles.cluster[0]

    @property
    def down(self) -> int:
        """Tiles along the rows of a plane."""
        return math.ceil(self.shapes.all_rows / self.cluster_rows)

    @property
    def across(self) -> int:
        """Tiles along the columns."""
        return math.ceil(self.shapes.columns / (self.tiles.columns * self.tiles.cluster[1]))

    @property
    def own_down(self) -> int:
        """Tiles along the rows of a plane that have rows of one owner."""
        return math.ceil(self.shapes.rows / self.cluster_rows)

    @property
    def shared(self) -> bool:
        """Whether a tile has rows of several owners. Then it has all rows that each owns."""
        return self.shapes.kind == "one_shot" or self.shapes.rows < self.cluster_rows

    @property
    def foreign_tiles(self) -> int:
        """Tiles without a row that this device owns."""
        return self.shapes.planes * (self.down - self.own_down) * self.across

    @property
    def sources(self) -> int:
        """Partial products that come through memory, for every sum; the rest is in registers."""
        return self.shapes.devices - (0 if self.shapes.kind == "one_shot" else 1)

    @property
    def sent_copies(self) -> float:
        """How often peers get a partial product, on average over all of a device's."""
        devices = self.shapes.devices
        return devices - 1 if self.shapes.kind == "one_shot" else 1 - 1 / devices

    def cluster_bytes(self, rows: int) -> int:
        """What a cluster's tile has of so many rows."""
        return ITEMSIZE * rows * self.tiles.columns * self.tiles.cluster[1]

    @property
    def halves(self) -> int:
        """Parts side by side, one for each consumer, that a tile's columns fall into."""
        return 2 if self.tiles.split == "columns" else 1

    @property
    def chunks(self) -> int:
        """Strips of a part's columns. A stage brings one of a partial product."""
        return self.tiles.all_strips

    @property
    def partial_steps(self) -> int:
        """Stages that the partial products of a tile take on their way into its sum."""
        return self.chunks * self.sources * self.halves

    @property
    def row_tiles(self) -> int:
        """Blocks' tiles, along the rows, that have rows of one owner."""
        return math.ceil(self.shapes.rows / self.tiles.rows)

    @property
    def column_tiles(self) -> int:
        """Blocks' tiles along the columns."""
        return self.across * self.tiles.cluster[1]

    @property
    def own_tiles(self) -> int:
        """Blocks' tiles that have rows of one owner."""
        return self.shapes.planes * self.row_tiles * self.column_tiles

    @property
    def choices(self) -> dict[str, Any]:
        """All that distinguishes it from other plans of the same call, as JSON has it."""
        kind, rows = self.shapes.kind, self.shapes.rows
        return {"tiles": asdict(self.tiles), "kind": kind, "owned_rows": rows}

    def fits(self) -> bool:
        """Whether the kernel can be cut so."""
        part_rows, _ = self.tiles.part
        rows, height = self.shapes.rows, self.cluster_rows
        # Several devices walk over a shared tile in the same order only if it is all they own.
        if self.shapes.kind != "one_shot" and rows % height and height % rows:
            return False
        # The rows of one owner are whole parts, or in one part.
        if self.shapes.kind != "one_shot" and rows % part_rows and part_rows % rows:
            return False
        # A tile is sent while the next one is multiplied.
        if self.tiles.strips < self.tiles.all_strips:
            return False
        # A strip at its sender is swizzled as the slices are in whose memory its owner gets it.
        if self.tiles.strip_columns * ITEMSIZE % self.tiles.swizzle:
            return False
        # And it fits into one.
        if self.tiles.contracted % self.tiles.strip_columns:
            return False
        return (
            self.shapes.problem.swizzles(self.tiles)
            and self.tiles.shared_memory_bytes <= SHARED_MEMORY_BYTES
        )


def padded(rows: int) -> list[int]:
    """What the rows that a device owns may be padded to, so that tiles have whole owners."""
    if rows <= 64:
        return [max(ROW_MULTIPLE, 1 << (rows - 1).bit_length())]
    return sorted({-(-rows // height) * height for height in (64, 128, 256)})


def make_plan(shapes: Shapes, multiprocessors: int = 132) -> Plan | None:
    """The cut measured or predicted to be fastest, or None where the kernel cannot do it.

    Args:
      shapes: with any number of rows; the plan's are padded. Those of an all-reduce are "one_shot":
        how it is done is the plan's choice.
      multiprocessors: of each GPU.
    """
    if shapes.kind == "one_shot":
        call = Call("matmul_all_reduce", shapes, multiprocessors)
        return call.choose(all_reduce_candidates(shapes, multiprocessors))
    call = Call("matmul_reduce_scatter", shapes, multiprocessors)
    return call.choose(candidates(shapes, multiprocessors))


@functools.cache
def all_reduce_candidates(shapes: Shapes, multiprocessors: int = 132) -> tuple[Plan, ...]:
    """All cuts of either kind for the shapes of a "one_shot", the likeliest to be fastest first."""
    two_step = replace(shapes, kind="two_step", rows=math.ceil(shapes.rows / shapes.devices))
    predicted = functools.partial(predicted_plan_microseconds, multiprocessors=multiprocessors)
    return in_order([*_plans(shapes), *_plans(two_step)], predicted, _sizes, _swept)


@functools.cache
def candidates(shapes: Shapes, multiprocessors: int = 132) -> tuple[Plan, ...]:
    """All cuts of this kind that the kernel can do, the likeliest to be fastest first."""
    predicted = functools.partial(predicted_plan_microseconds, multiprocessors=multiprocessors)
    return in_order(_plans(shapes), predicted, _sizes, _swept)


def _plans(shapes: Shapes) -> list[Plan]:
    if shapes.kind == "one_shot":
        heights = [-(-shapes.rows // ROW_MULTIPLE) * ROW_MULTIPLE]
    else:
        heights = padded(shapes.rows)
    return [
        Plan(owned, tiles)
        for owned in (replace(shapes, rows=rows) for rows in heights)
        for tiles in cuts(functools.partial(_fits, owned), all_strips=True)
    ]


def _sizes(plan: Plan) -> tuple[Any, ...]:
    return plan.shapes, plan.tiles.rows, plan.tiles.columns


def _swept(plan: Plan) -> list[Plan]:
    # Tiles with own rows are swept apart from the others.
    most = max(plan.own_down, plan.down - plan.own_down)
    return [replace(plan, tiles=tiles) for tiles in swept(plan.tiles, most, plan.across)]


def _fits(shapes: Shapes, tiles: Tiles) -> bool:
    return Plan(shapes, tiles).fits()


# Slower by so much are tiles that are sent and summed in strips of 32 columns.
_NARROW_STRIPS = 1.2
# What it takes that the blocks of a cluster wait for each other.
_CLUSTER_MICROSECONDS = 4.0
# What the copy engine of a multiprocessor reads of partial products.
_PARTIAL_BYTES_PER_MICROSECOND = 1.2e5


def predicted_plan_microseconds(plan: Plan, multiprocessors: int = 132) -> float:
    """What a launch should take, and what it waits for peers that began when it did."""
    shapes, tiles = plan.shapes, plan.tiles
    clusters = multiprocessors // math.prod(tiles.cluster)
    waves = math.ceil(shapes.planes * plan.down * plan.across / clusters)
    computing = computing_microseconds(shapes.problem, tiles, multiprocessors)
    if tiles.strip_columns < 64:
        computing *= _NARROW_STRIPS
    if tiles.share is not None:
        computing += _CLUSTER_MICROSECONDS
    product_bytes = ITEMSIZE * shapes.planes * shapes.all_rows * shapes.columns
    trips = 2 if shapes.kind == "two_step" else 1
    computing += trips * plan.sent_copies * product_bytes / SENT_BYTES_PER_MICROSECOND
    own_waves = waves * plan.own_down / plan.down
    partial_bytes = ITEMSIZE * min(tiles.rows, shapes.rows) * tiles.columns * plan.sources
    adding = own_waves * partial_bytes / _PARTIAL_BYTES_PER_MICROSECOND
    summed = max(computing, _arrived_microseconds(plan, computing / waves, clusters)) + adding
    return summed + (_returning_microseconds(plan, clusters) if trips == 2 else 0)


def _arrived_microseconds(plan: Plan, wave: float, clusters: int) -> float:
    """When the last partial product comes that peers send, who multiply tiles in such waves.

    What is sent of a tile travels while the next is multiplied. Of the last wave that has something
    to send, all does at once.
    """
    tiles = plan.shapes.planes * plan.down * plan.across if plan.shared else plan.foreign_tiles
    copies = plan.sent_copies if plan.shared else 1
    rows = min(plan.cluster_rows, plan.shapes.all_rows)
    sending = copies * plan.cluster_bytes(rows) / LINK_BYTES_PER_MICROSECOND
    waves = math.ceil(tiles / clusters)
    last = tiles - (waves - 1) * clusters
    return ARRIVAL_MICROSECONDS + max(waves * wave + last * sending, wave + tiles * sending)


def _returning_microseconds(plan: Plan, clusters: int) -> float:
    """What the sums of the last wave take to all peers."""
    shapes = plan.shapes
    last = 1 + (shapes.planes * plan.own_down * plan.across - 1) % clusters
    sums_bytes = last * plan.cluster_bytes(min(shapes.rows, plan.cluster_rows))
    return ARRIVAL_MICROSECONDS + (shapes.devices - 1) * sums_bytes / LINK_BYTES_PER_MICROSECOND
