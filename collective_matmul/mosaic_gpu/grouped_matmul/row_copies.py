"""Copies of rows between global and shared memory that TMA cannot make: by index, or masked.

Each thread of a warpgroup copies 16 bytes at a time. In shared memory, rows are in the layout that
wgmma and TMA have in common: tiles of 8 rows of 128 bytes, whose 16-byte units are swizzled.

Pallas' interpreter knows nothing of threads. There, rows are copied one after another.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from collective_matmul.mosaic_gpu.hopper_matmul.tiling import ROW_MULTIPLE
from collective_matmul.mosaic_gpu.kernel_types import Ref, Scalar
from collective_matmul.mosaic_gpu.peers.peer_memory import inline_ptx

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu

_SCALAR = plgpu.Layout.WG_SPLAT(())
_LANES = 128
# Bytes of a row of a swizzled tile, and of what one thread copies at once.
_ROW_BYTES, _UNIT_BYTES = 128, 16
_UNITS = _ROW_BYTES // _UNIT_BYTES


class RowRange(NamedTuple):
    """Rows of an array, in a row of tiles.

    Attributes:
      first: the first row that is copied.
      start: rows before this one count as zero.
      end: as do this row and those after it.
    """

    first: Scalar
    start: Scalar
    end: Scalar

    def within(self, height: int) -> tuple[Scalar, Scalar]:
        """Returns which of `height` rows from the first on are there: their range."""
        bounds = (jnp.clip(bound - self.first, 0, height) for bound in (self.start, self.end))
        low, high = bounds
        return low, high


def start_copy_of_rows(
    x: Ref,
    index: Ref | None,
    rows: RowRange,
    column: Scalar,
    to: Ref,
    *,
    clips: bool,
    interpreted: bool,
) -> None:
    """Starts to copy rows to shared memory, as one group of asynchronous copies.

    Args:
      x: the array [S, C] in global memory, of a dtype of 1 or 2 bytes.
      index: int32 [M], the row of x for each row; None: the row itself.
      rows: which rows to copy; others of the block of shared memory become zero.
      column: first column, a multiple of 16 bytes. Columns beyond C become zero.
      to: a block of shared memory, [rows, columns], whose tiles are 8 rows of 128 bytes, swizzled.
      clips: whether there may be columns beyond C.
      interpreted: whether this runs in Pallas' interpreter.
    """
    if interpreted:
        _copy_row_by_row(x, index, rows, column, to)
        return
    width = _ROW_BYTES // jnp.dtype(to.dtype).itemsize
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(_ROW_BYTES))
    refs = [plgpu.RefType()] * (1 if index is None else 2)

    @plgpu.inline_mgpu(arg_types=(refs, plgpu.RefType(transforms), [_SCALAR] * 4))
    def at(_, arrays, to, scalars):
        first, start, end, column = (s.registers.item() for s in scalars)
        _copy_units(arrays[0], arrays[1:], (first, start, end), column, to, clips)
        nvvm.cp_async_commit_group()

    at([x] if index is None else [x, index], to, [*map(jnp.int32, (*rows, column))])


class _LaneUnits(NamedTuple):
    """The 16-byte units that a thread copies, one of each 16 rows; MLIR values.

    Attributes:
      row: its first row.
      unit: which unit of a row of a tile.
      shared: the address in shared memory of the first one.
    """

    row: Any
    unit: Any
    shared: Any


#: Rows that a warpgroup copies at once.
_ROWS_AT_ONCE = _LANES // _UNITS
_TILE_BYTES = ROW_MULTIPLE * _ROW_BYTES


def _units_of_lane(to: Any) -> _LaneUnits:
    """Emits which units of a block [row tiles, column tiles, 8, 128 bytes] a thread copies."""
    i32, block = ir.IntegerType.get_signless(32), ir.MemRefType(to.type)
    _, tile_columns, height, width = block.shape
    assert (height, utils.bytewidth(block.element_type) * width) == (ROW_MULTIPLE, _ROW_BYTES)
    lane = arith.remui(utils.thread_idx(), _i32(_LANES))
    unit, row = (divide(lane, _i32(_UNITS)) for divide in (arith.remui, arith.divui))
    in_tile = arith.remui(row, _i32(ROW_MULTIPLE))
    row_tile = arith.divui(row, _i32(ROW_MULTIPLE))
    # Units of a row are permuted by the number of the row in its tile.
    swizzled = arith.muli(arith.xori(unit, in_tile), _i32(_UNIT_BYTES))
    place = arith.addi(arith.muli(in_tile, _i32(_ROW_BYTES)), swizzled)
    place = arith.addi(place, arith.muli(row_tile, _i32(tile_columns * _TILE_BYTES)))
    base = llvm.ptrtoint(i32, utils.memref_ptr(to))
    return _LaneUnits(row, unit, arith.addi(base, place))


def _copy_units(
    x: Any, index: Any, rows: tuple[Any, Any, Any], column: Any, to: Any, clips: bool
) -> None:
    """Emits the copies of a thread; all arguments are MLIR values."""
    i64 = ir.IntegerType.get_signless(64)
    first, start, end = rows
    sources, columns = ir.MemRefType(x.type).shape
    tile_rows, tile_columns, _, width = ir.MemRefType(to.type).shape
    itemsize = _ROW_BYTES // width
    lane = _units_of_lane(to)
    base = llvm.ptrtoint(i64, utils.memref_ptr(x))
    unit_column = arith.addi(column, arith.muli(lane.unit, _i32(_UNIT_BYTES // itemsize)))
    for step in range(tile_rows * ROW_MULTIPLE // _ROWS_AT_ONCE):
        row = arith.addi(arith.addi(first, lane.row), _i32(step * _ROWS_AT_ONCE))
        is_row = _is_within(row, start, end)
        source = arith.select(is_row, row, start)
        if index:
            source = _load_int32(index[0], source)
        # No address is beyond the array, also where nothing is read.
        source = arith.extui(i64, arith.minsi(source, _i32(sources - 1)))
        row_address = arith.addi(base, arith.muli(source, gpu.c(itemsize * columns, i64)))
        for tile in range(tile_columns):
            at = arith.addi(unit_column, _i32(width * tile))
            is_there = is_row
            if clips:
                is_there = arith.andi(is_row, _is_within(at, _i32(0), _i32(columns)))
            offset = arith.muli(arith.extui(i64, at), gpu.c(itemsize, i64))
            address = arith.select(is_there, arith.addi(row_address, offset), base)
            row_tile = step * _ROWS_AT_ONCE // ROW_MULTIPLE
            shared = arith.addi(lane.shared, _i32((row_tile * tile_columns + tile) * _TILE_BYTES))
            _cp_async(shared, address, arith.select(is_there, _i32(_UNIT_BYTES), _i32(0)))


def _i32(value: int) -> Any:
    return gpu.c(value, ir.IntegerType.get_signless(32))


def _is_within(value: Any, start: Any, end: Any) -> Any:
    return arith.andi(
        arith.cmpi(arith.CmpIPredicate.sge, value, start),
        arith.cmpi(arith.CmpIPredicate.slt, value, end),
    )


def _load_int32(array: Any, place: Any) -> Any:
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    pointer = utils.getelementptr(utils.memref_ptr(array), [arith.extui(i64, place)], i32)
    return llvm.load(i32, pointer)


def _cp_async(to: Any, source: Any, size: Any) -> None:
    """Copies 16 bytes, or zeros if `size` is 0."""
    to = llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), to)
    source = llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), source)
    modifier = nvvm.LoadCacheModifierKind.CG
    nvvm.cp_async_shared_global(to, source, _UNIT_BYTES, modifier, cp_size=size)


def _copy_row_by_row(x: Ref, index: Ref | None, rows: RowRange, column: Scalar, to: Ref) -> None:
    width = _ROW_BYTES // jnp.dtype(to.dtype).itemsize
    to[...] = jnp.zeros(to.shape, to.dtype)

    def copy(number: Scalar, offset: int) -> None:
        row = rows.first + number
        source = row if index is None else index[row]
        to[number, pl.ds(offset, width)] = x[source, pl.ds(column + offset, width)]

    for offset in range(0, to.shape[1], width):

        @pl.when(column + offset < x.shape[1])
        def _(offset: int = offset) -> None:
            pl.loop(*rows.within(to.shape[0]))(functools.partial(copy, offset=offset))


def wait_for_copies(in_flight: int) -> None:
    """Waits until at most this many groups of copies are in flight, and shows wgmma the others."""

    @plgpu.inline_mgpu()
    def at(_) -> None:
        nvvm.cp_async_wait_group(in_flight)

    at()
    plgpu.commit_smem()


def store_rows(
    product: jax.Array,
    plane: Ref,
    rows: RowRange,
    column: Scalar,
    *,
    clips: bool,
    store_tile: Ref,
    interpreted: bool,
) -> None:
    """Stores the rows of a product that are in a range, from registers.

    Args:
      product: [rows, columns] in wgmma's layout, in the dtype of the plane.
      plane: [M, N] in global memory.
      rows: `first` is the row of the plane for the product's first; those from `start` to `end` are
        stored.
      column: the column of the plane for the product's first. Others than the N are not stored.
      clips: whether there may be columns beyond the N.
      store_tile: [rows, any] in shared memory, which the interpreter uses.
      interpreted: whether this runs in Pallas' interpreter.
    """
    if interpreted:
        _store_row_by_row(product, plane, rows, column, store_tile)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), [_SCALAR] * 4))
    def at(_, product, plane, scalars):
        first, start, end, column = (s.registers.item() for s in scalars)
        _store_pairs(product, plane, (first, start, end), column, clips)

    at(product, plane, [*map(jnp.int32, (*rows, column))])


def _store_pairs(
    product: Any, plane: Any, rows: tuple[Any, Any, Any], column: Any, clips: bool
) -> None:
    """Emits the stores of a thread, of two elements each; arguments are MLIR values."""
    first, start, end = rows
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    _, columns = ir.MemRefType(plane.type).shape
    base = llvm.ptrtoint(i64, utils.memref_ptr(plane))
    indices = product.layout.thread_idxs(product.shape)
    for pair, (row, pair_column) in zip(product.registers.flat, indices, strict=True):
        row = arith.addi(first, arith.index_castui(i32, row))
        pair_column = arith.addi(column, arith.index_castui(i32, pair_column))
        stored = _is_within(row, start, end)
        if clips:
            stored = arith.andi(stored, _is_within(pair_column, _i32(0), _i32(columns)))
        offset = arith.addi(
            arith.muli(arith.extsi(i64, row), gpu.c(columns, i64)), arith.extsi(i64, pair_column)
        )
        address = arith.addi(base, arith.muli(offset, gpu.c(2, i64)))
        # Predicates, not branches: with these it takes seconds to compile.
        pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), address)
        inline_ptx(None, [stored, pointer, utils.bitcast(pair, i32)], "@$0 st.global.b32 [$1], $2;")


def _store_row_by_row(
    product: jax.Array, plane: Ref, rows: RowRange, column: Scalar, store_tile: Ref
) -> None:
    height, width = store_tile.shape
    low, high = rows.within(height)
    plgpu.wait_smem_to_gmem(0)
    for offset in range(0, product.shape[1], width):
        store_tile[...] = product[:, offset : offset + width]

        @pl.when(column + offset < plane.shape[1])
        def _(offset: int = offset) -> None:
            @pl.loop(low, high)
            def _(number: Scalar) -> None:
                place = rows.first + number, pl.ds(column + offset, width)
                plane[place] = store_tile[number, :]
