"""How the kernel that gathers and multiplies is cut: its tiles, and what a device sends at once."""

from __future__ import annotations

import functools
import math
from collections import Counter
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

#: Bytes of shared memory that each block has for boxes under way, of which there are two at least.
BOXES_BYTES = 16_384
# Boxes are at most so large, in bytes. To send one takes a block about a microsecond, whatever it
# holds.
_BOX_BYTES = (8_192, 4_096, 2_048)
# Of few rows a block sends so many if it can: those of the first slab first.
_BOXES_PER_BLOCK = 4
# Boxes are parts of rows by multiples of this: Mosaic copies multiples of 128 bytes.
_COLUMN_MULTIPLE = 64
# In how many slabs K may be sent. Narrow ones would be sent in small pieces.
_SLABS = (1, 2, 4, 8, 16)
_SLAB_COLUMNS = 512
# What senders leave of shared memory.
_TILE_BYTES = SHARED_MEMORY_BYTES - BOXES_BYTES
# So many messages for each block keep all of them sending to the end, and rows arriving in order.
_MESSAGES_PER_BLOCK = 4

# What a producer takes to look whether a slab has arrived.
_AWAITING_MICROSECONDS = 0.2
# Some multiprocessor sends later than the others: so much of the whole its part of all rows may be
# late, and less if that is of one slab.
_LATE = 0.02
# What arrives where several peers send at once: more than of XLA's all-gathers, less than of one.
_CROWDED_LINK_BYTES_PER_MICROSECOND = 3.0e5
# Tiles of joined shards begin with rows of every peer: each adds to what the last is late.
_JOINING_MICROSECONDS = 4.0


@dataclass(frozen=True)
class Shapes:
    """What is gathered and multiplied.

    Attributes:
      devices: D, on the axis.
      planes: of a shard: the product of the dimensions before the gathered one.
      rows: of a shard in each plane.
      contracted: K.
      columns: of each result.
      w_contracted: the axis of the weights that is summed over, counted from 1.
    """

    devices: int
    planes: int
    rows: int
    contracted: int
    columns: tuple[int, ...]
    w_contracted: Literal[1, 2] = 1

    @property
    def shard_bytes(self) -> int:
        """What a device has of x."""
        return ITEMSIZE * self.planes * self.rows * self.contracted

    def problem(self, joins: bool) -> Problem:
        """The matmul of all shards, each in planes of its own, or joined."""
        batch, rows = self.planes * self.devices, self.rows
        if joins:
            batch, rows = self.planes, self.rows * self.devices
        return Problem(
            batch, rows, (self.contracted,), self.columns, w_contracted=self.w_contracted
        )


@dataclass(frozen=True)
class Plan:
    """One cut of it.

    Attributes:
      shapes: of the operands.
      tiles: of the matmul.
      joins: whether tiles reach over several shards.
      rows_per_group: of a shard in each plane, about as many as are multiplied at once. The last
        group of a plane may have fewer.
      slabs: equal ranges of K. Of the rows of a group, one is sent after the other, and each is
        multiplied once it has arrived.
      box: rows and columns of a slab that are sent at once. Boxes fill the slab of every group.
      boxes_per_message: boxes, one after the other, that are counted as one.
      passes: how many peers get the shard in each turn of sending it, those that need it first in
        the first. Within a turn they get every message at the same time.
    """

    shapes: Shapes
    tiles: Tiles
    joins: bool
    rows_per_group: int
    slabs: int
    box: tuple[int, int]
    boxes_per_message: int
    passes: tuple[int, ...]

    @property
    def slab_columns(self) -> int:
        """Of x."""
        return self.shapes.contracted // self.slabs

    @property
    def pieces(self) -> int:
        """Of memory that a box of x consists of."""
        high, wide = self.box
        return 1 if wide == self.shapes.contracted else high

    @property
    def buffers(self) -> int:
        """Boxes that are under way in each block, from the shard to the peers."""
        high, wide = self.box
        return BOXES_BYTES // max(ITEMSIZE * high * wide, min(_BOX_BYTES))

    @property
    def boxes_across(self) -> int:
        """Side by side, that a slab is as wide as."""
        return self.slab_columns // self.box[1]

    @property
    def groups(self) -> int:
        """Groups of rows in each plane of a shard."""
        return math.ceil(self.shapes.rows / self.rows_per_group)

    def boxes_per_slab(self, rows: int) -> int:
        """Boxes that one slab of so many rows is sent in."""
        return rows // self.box[0] * self.boxes_across

    @property
    def boxes_per_plane(self) -> int:
        """Boxes that each plane of a shard is sent in."""
        return self.slabs * self.boxes_per_slab(self.shapes.rows)

    @property
    def messages(self) -> int:
        """Messages that a shard is sent in."""
        return self.shapes.planes * self.boxes_per_plane // self.boxes_per_message

    @property
    def down(self) -> int:
        """Tiles along the rows of a plane, counted by clusters."""
        rows = self.shapes.problem(self.joins).rows
        return math.ceil(rows / (self.tiles.rows * self.tiles.cluster[0]))

    @property
    def across(self) -> int:
        """Tiles along the columns, counted by clusters."""
        columns = self.tiles.columns * self.tiles.cluster[1]
        return sum(math.ceil(size / columns) for size in self.shapes.columns)

    @property
    def tile_count(self) -> int:
        """Tiles of all results, counted by clusters."""
        return self.shapes.problem(self.joins).batch * self.down * self.across

    @property
    def choices(self) -> dict[str, Any]:
        """All that distinguishes it from other plans of the same call, as JSON has it."""
        return {
            "tiles": asdict(self.tiles),
            "joins": self.joins,
            "slabs": self.slabs,
            "box": list(self.box),
            "boxes_per_message": self.boxes_per_message,
            "passes": list(self.passes),
        }


def make_plan(shapes: Shapes, multiprocessors: int = 132) -> Plan | None:
    """The cut measured or predicted to be fastest, or None where the kernel cannot do it.

    `shapes` may have any number of rows; the plan's are padded where they must be.
    """
    call = Call("all_gather_matmul", shapes, multiprocessors)
    return call.choose(candidates(shapes, multiprocessors))


@functools.cache
def candidates(shapes: Shapes, multiprocessors: int = 132) -> tuple[Plan, ...]:
    """All cuts that the kernel can do, the likeliest to be fastest first."""
    # Padding costs a pass over the shard, and one over what is cut off the results.
    padded = replace(shapes, rows=-(-shapes.rows // ROW_MULTIPLE) * ROW_MULTIPLE)
    plans = _plans(shapes, multiprocessors) or _plans(padded, multiprocessors)

    def vary(plan: Plan) -> list[Plan]:
        boxed = [_sent_in(plan, size, multiprocessors) for size in _BOX_BYTES]
        slabs = _slabbed(plan.shapes, plan.tiles, plan.joins, plan.passes, multiprocessors)
        others = (
            _plan(plan.shapes, tiles, plan.joins, plan.slabs, plan.passes, multiprocessors)
            for tiles in swept(plan.tiles, plan.across, plan.down)
        )
        return [other for other in dict.fromkeys((*boxed, *slabs, *others)) if other != plan]

    predicted = functools.partial(predicted_plan_microseconds, multiprocessors=multiprocessors)
    return in_order(plans, predicted, _sizes, vary)


def _sizes(plan: Plan) -> tuple[Any, ...]:
    return plan.tiles.rows, plan.tiles.columns, plan.joins, plan.passes


def _plans(shapes: Shapes, multiprocessors: int) -> list[Plan]:
    if shapes.contracted % _COLUMN_MULTIPLE:
        return []

    def fits(problem: Problem, tiles: Tiles) -> bool:
        return tiles.shared_memory_bytes <= _TILE_BYTES and _swizzles(problem, tiles)

    def in_order_of_arrival(joins: bool) -> list[Tiles]:
        """Rows of one height are multiplied before the next."""
        found = cuts(functools.partial(fits, shapes.problem(joins)))
        return [replace(tiles, sweep="columns") for tiles in found]

    predicted = functools.partial(predicted_plan_microseconds, multiprocessors=multiprocessors)
    return [
        min(_slabbed(shapes, tiles, joins, passes, multiprocessors), key=predicted)
        for joins in (False, True)
        for tiles in in_order_of_arrival(joins)
        for passes in _passes(shapes, tiles, joins, multiprocessors)
    ]


def _slabbed(
    shapes: Shapes, tiles: Tiles, joins: bool, passes: tuple[int, ...], multiprocessors: int
) -> list[Plan]:
    """Plans that differ in their number of slabs."""
    counts = (
        slabs
        for slabs in _SLABS
        if shapes.contracted % (slabs * _COLUMN_MULTIPLE) == 0
        and (slabs == 1 or shapes.contracted // slabs >= _SLAB_COLUMNS)
    )
    return [_plan(shapes, tiles, joins, slabs, passes, multiprocessors) for slabs in counts]


def _passes(
    shapes: Shapes, tiles: Tiles, joins: bool, multiprocessors: int
) -> list[tuple[int, ...]]:
    """One after the other; and together those whose tiles are multiplied in one wave."""
    peers = shapes.devices - 1
    if joins:
        return [(peers,)]
    plan = Plan(shapes, tiles, joins, shapes.rows, 1, (1, 1), 1, ())
    per_chunk = plan.tile_count / shapes.devices
    clusters = multiprocessors // math.prod(tiles.cluster)
    waves = Counter(int((chunk + 0.5) * per_chunk / clusters) for chunk in range(1, peers + 1))
    return list(dict.fromkeys([(1,) * peers, tuple(waves.values())]))


def _plan(
    shapes: Shapes,
    tiles: Tiles,
    joins: bool,
    slabs: int,
    passes: tuple[int, ...],
    multiprocessors: int,
) -> Plan:
    plan = Plan(shapes, tiles, joins, shapes.rows, slabs, (1, 1), 1, passes)
    if not joins:
        clusters = multiprocessors // math.prod(tiles.cluster)
        down = max(1, clusters // min(plan.across, tiles.sweep_width))
        group = min(shapes.rows, down * tiles.rows * tiles.cluster[0])
        plan = replace(plan, rows_per_group=group)
    return _sent_in(plan, _usual_box_bytes(plan, multiprocessors), multiprocessors)


def _usual_box_bytes(plan: Plan, multiprocessors: int) -> int:
    """How large boxes are at most where nothing else was measured."""
    # Most shards are powers of two: so many blocks share one evenly.
    senders = 1 << multiprocessors.bit_length() - 1
    share = plan.shapes.shard_bytes // (min(plan.slabs, _BOXES_PER_BLOCK) * senders)
    return next((size for size in _BOX_BYTES if size <= share), min(_BOX_BYTES))


def _sent_in(plan: Plan, box_bytes: int, multiprocessors: int) -> Plan:
    """The same, in boxes of at most so many bytes, and in as few messages as keep all sending."""
    boxed = replace(plan, box=_box(plan, box_bytes), boxes_per_message=1)
    # No message is of two slabs.
    boxes = boxed.boxes_per_slab(_rows_of_all_groups(plan))
    wanted = max(1, boxed.messages // (_MESSAGES_PER_BLOCK * multiprocessors))
    return replace(boxed, boxes_per_message=_largest_divisor(boxes, wanted))


def predicted_plan_microseconds(plan: Plan, multiprocessors: int = 132) -> float:
    """What a launch should take, and what it waits for peers."""
    shapes = plan.shapes
    problem = shapes.problem(plan.joins)
    computing = computing_microseconds(problem, plan.tiles, multiprocessors)
    computing += problem.batch * plan.slabs * _AWAITING_MICROSECONDS
    computing *= 1 + _LATE / plan.slabs
    sent_bytes = shapes.shard_bytes * (shapes.devices - (0 if plan.joins else 1))
    computing += sent_bytes / SENT_BYTES_PER_MICROSECOND
    clusters = min(plan.tile_count, multiprocessors // math.prod(plan.tiles.cluster))
    # Those that come to shards of peers first, and last, wait longest.
    return max(
        _waiting_microseconds(plan, computing, cluster, clusters)
        for cluster in {0, clusters // 2, (plan.tile_count - 1) % clusters, clusters - 1}
    )


def _waiting_microseconds(plan: Plan, computing: float, cluster: int, clusters: int) -> float:
    """When one of the clusters ends, which compute for so long and await slabs before."""
    shapes = plan.shapes
    peers = shapes.devices - 1
    crowded = max(plan.passes) > 1
    rate = _CROWDED_LINK_BYTES_PER_MICROSECOND if crowded else LINK_BYTES_PER_MICROSECOND
    shard = shapes.shard_bytes / rate
    # By chunk, from that of the first peer on: passes before its own, and peers in that.
    turns = [
        (sum(plan.passes[:number]), count)
        for number, count in enumerate(plan.passes)
        for _ in range(count)
    ]
    arrival = ARRIVAL_MICROSECONDS + (peers * _JOINING_MICROSECONDS if plan.joins else 0)
    tiles = plan.tile_count
    per_chunk = tiles // (shapes.planes if plan.joins else shapes.devices)
    wave, now = computing / math.ceil(tiles / clusters), 0.0
    groups = shapes.planes * plan.groups
    # Within so much of a chunk's tiles all its rows are multiplied for the first time.
    sweep = min(1.0, plan.tiles.sweep_width / plan.across)
    all_arrived = arrival + peers * shard
    for tile in range(cluster, tiles, clusters):
        chunk, within = divmod(tile, per_chunk)
        if now >= all_arrived:
            return now + len(range(tile, tiles, clusters)) * wave
        if chunk == 0 and not plan.joins:
            now += wave
            continue
        if plan.joins:
            before, sent = 0.0, peers * shard
        else:
            group = min(groups - 1, int(groups * within / (per_chunk * sweep)))
            others, together = turns[chunk - 1]
            before = (others + together * group / groups) * shard
            sent = together * shard / groups
        first, whole = (arrival + before + sent * share for share in (1 / plan.slabs, 1))
        now = max(max(now, first) + wave, whole + wave / plan.slabs)
    return now


def _swizzles(problem: Problem, tiles: Tiles) -> bool:
    """Whether all slices can be swizzled, and consumers' parts end where a swizzle does."""
    whole = tiles.split == "rows" or tiles.part[1] % (tiles.swizzle // ITEMSIZE) == 0
    return whole and problem.swizzles(tiles)


def _box(plan: Plan, most_bytes: int) -> tuple[int, int]:
    """The largest box that fills slabs without a rest."""
    columns, most = plan.slab_columns, most_bytes // ITEMSIZE
    if columns > most:
        parts = columns // _COLUMN_MULTIPLE
        return 1, _COLUMN_MULTIPLE * _largest_divisor(parts, most // _COLUMN_MULTIPLE)
    return _largest_divisor(_rows_of_all_groups(plan), most // columns), columns


def _rows_of_all_groups(plan: Plan) -> int:
    """What the rows of each group are a multiple of, those of a smaller last one too."""
    return math.gcd(plan.shapes.rows, plan.rows_per_group)


def _largest_divisor(number: int, most: int) -> int:
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)
