"""Numbers of rows that no table has, at the widths of Llama 3 8B on two devices."""

from __future__ import annotations

import re

import jax
import pytest
from jax import ShapeDtypeStruct
from jax.sharding import PartitionSpec as P

from collective_matmul.hardware import HOPPER
from collective_matmul.ops.matmul.fused import all_gather, backend, reduce_scatter
from collective_matmul.ops.matmul.request import Op
from tests.conftest import MeshFactory
from tests.dispatch.sites import site_of
from tests.hopper import assert_an_ordinary_kernel, needs_kernels
from tests.reference import AXIS, OPS

GATHER, SCATTER, ALL_REDUCE = OPS
ROWS = (24, 48, 96, 384)
WIDTHS = {GATHER: [(4096, 6144), (4096, 14336), (4096, 128256)], SCATTER: [(14336, 4096)]}
SITES = [(op, m, k, n) for op, widths in WIDTHS.items() for m in ROWS for k, n in widths]
#: Each number of rows with each op, and each width.
DEFAULT = {(op, m, *WIDTHS[op][i % len(WIDTHS[op])]) for op in WIDTHS for i, m in enumerate(ROWS)}


def lowered(op: Op, rows: int, contracted: int, columns: int, make_mesh: MeshFactory) -> str:
    """The program of the kernel, with the configuration that is chosen."""
    gathers = op == GATHER

    def call(x: jax.Array, w: jax.Array) -> jax.Array:
        if gathers:
            return all_gather.all_gather_matmul(x, [w], AXIS, dimension=0)[0][0]
        return reduce_scatter.matmul_reduce_scatter([x], [w], AXIS, dimension=0)

    by_rows, by_columns = P(AXIS), P(None, AXIS)
    specs = (by_rows, by_columns, by_columns) if gathers else (by_columns, by_rows, by_rows)
    mesh = make_mesh({AXIS: 2})
    sharded = jax.shard_map(call, mesh=mesh, in_specs=specs[:2], out_specs=specs[2])
    shapes = (rows, contracted), (contracted, columns)
    traced = jax.jit(sharded).trace(*(ShapeDtypeStruct(shape, "bfloat16") for shape in shapes))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@needs_kernels
@pytest.mark.parametrize(
    ("op", "rows", "contracted", "columns"),
    [pytest.param(*s, marks=() if s in DEFAULT else pytest.mark.exhaustive) for s in SITES],
)
def test_lowers_and_pads_nothing_that_a_tile_can_hold(
    op: Op, rows: int, contracted: int, columns: int, make_mesh: MeshFactory, _for_hopper: None
) -> None:
    """A pad and a slice would be kernels of XLA that take as long as a third of the product.

    Sums of 12 rows for each device are padded to 16, since rows are stored eight at a time.
    """
    text = lowered(op, rows, contracted, columns, make_mesh)
    assert_an_ordinary_kernel(text)
    padded = re.search(r"stablehlo\.pad .*high = \[[0, ]*[1-9]", text) is not None
    assert padded == (op == SCATTER and rows == 24)


@pytest.mark.parametrize(
    ("op", "rows", "padded"),
    [
        (GATHER, 24, False),
        (GATHER, 12, True),
        (SCATTER, 24, True),
        (SCATTER, 48, False),
        (SCATTER, 96, False),
        (ALL_REDUCE, 24, False),
        (ALL_REDUCE, 12, True),
    ],
)
def test_what_is_predicted_includes_kernels_that_pad(
    op: Op, rows: int, padded: bool, _for_hopper: None
) -> None:
    """Beside the next power of two, whose rows are never padded."""
    few, more = (
        backend._kernel_seconds(site_of(op, m, 4096, 4096, devices=2))
        for m in (rows, 1 << rows.bit_length())
    )
    assert (few - more > 1.5 * HOPPER.kernel_seconds) == padded
