"""Descriptions of a site, and where it says that it stands."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import collective_matmul
from collective_matmul.dispatch.recording import Decision, record_decisions
from collective_matmul.ops.matmul.request import Site
from collective_matmul.source_location import SourceLocation
from tests.conftest import MeshFactory
from tests.dispatch.sites import BFLOAT16, site_of
from tests.reference import AXIS, OPS


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_costs_of_a_site(devices: int) -> None:
    """Global sizes: 2 M K N operations over all devices, D - 1 of D parts of what is exchanged."""
    rows, contracted, columns, itemsize = 64, 32, 16, 2
    exchanged = {
        "all_gather_matmul": rows * contracted * (devices - 1) // devices,
        "matmul_reduce_scatter": rows * columns * (devices - 1) // devices,
        "matmul_all_reduce": 2 * rows * columns * (devices - 1) // devices,
    }
    for op in OPS:
        site = site_of(op, rows, contracted, columns, devices)
        assert site.flops * devices == 2 * rows * contracted * columns
        assert site.bytes_communicated == exchanged[op] * itemsize
        assert site.rows == (rows // devices if op == "all_gather_matmul" else rows)


def test_costs_of_several_weights_and_a_co_gathered_operand() -> None:
    x, co_gathered = (2, 6, 4), (2, 2, 5)
    site = Site(
        "matmul_reduce_scatter", ((x, (4, 5)), ((2, 6, 3), (3, 5))), BFLOAT16, AXIS, 3, co_gathered
    )
    assert site.flops == 2 * (2 * 6 * 4 * 5 + 2 * 6 * 3 * 5)
    # One sum is exchanged for both, and the co_gathered is passed on twice.
    assert site.bytes_communicated == 2 * (2 * (2 * 2 * 5) + 2 * math.prod(co_gathered))


@pytest.mark.parametrize(
    ("dtype", "last", "aligned"),
    [
        (BFLOAT16, (4, 16), False),
        (BFLOAT16, (8, 12), False),
        (BFLOAT16, (8, 16), True),
        (np.dtype(np.float32), (4, 12), True),
        (np.dtype(np.float32), (6, 12), False),
    ],
)
def test_every_weight_must_be_aligned(
    dtype: np.dtype, last: tuple[int, int], aligned: bool
) -> None:
    operands = (((2, 8), (8, 16)), ((2, last[0]), last))
    assert Site("matmul_reduce_scatter", operands, dtype, AXIS, 2).is_aligned == aligned


def test_a_site_reads_well() -> None:
    x, gather = (2, 3), "all_gather_matmul"
    site = Site(gather, ((x, (3, 4)), (x, (3, 5))), BFLOAT16, AXIS, 4, keep_gathered=True)
    assert str(site) == f"{gather} bfloat16 [2,3]@[3,4],[3,5], gathered kept over tensor=4"
    scatter = Site(
        "matmul_reduce_scatter", ((x, (3, 4)),), BFLOAT16, AXIS, 2, co_gathered=(1, 3)
    ).flat
    assert str(scatter) == "matmul_reduce_scatter bfloat16 [2,3]@[3,4], with [1,3] over devices=2"


def test_a_flat_site_forgets_how_rows_are_arranged_and_what_the_axis_is_called() -> None:
    x, co_gathered = (2, 6, 4), (2, 2, 5)
    shaped = Site("matmul_reduce_scatter", ((x, (4, 5)),), BFLOAT16, "a", 3, co_gathered)
    joined = Site("matmul_reduce_scatter", (((12, 4), (4, 5)),), BFLOAT16, "b", 3, (4, 5))
    assert shaped != joined
    assert shaped.flat == joined.flat
    assert hash(shaped.flat) == hash(joined.flat)
    assert shaped.flat.flops == shaped.flops
    assert shaped.flat.bytes_communicated == shaped.bytes_communicated


def test_sizes_of_several_weights_and_several_operands() -> None:
    x = (6, 4)
    gather = Site("all_gather_matmul", ((x, (4, 5)), (x, (4, 7))), BFLOAT16, AXIS, 3)
    assert (gather.rows, gather.product_rows) == (6, 18)
    assert (gather.contracted, gather.columns) == (4, 12)
    scatter = Site(
        "matmul_reduce_scatter",
        ((x, (4, 5)), ((6, 2), (2, 5))),
        BFLOAT16,
        AXIS,
        3,
        co_gathered=(2, 9),
    )
    assert (scatter.rows, scatter.product_rows) == (6, 6)
    assert (scatter.contracted, scatter.columns) == (6, 5)
    assert scatter.has_weight_gradient
    assert not gather.has_weight_gradient


def layer(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    hidden = collective_matmul.all_gather_matmul(x, up, AXIS)  # Line 1 of the op calls.
    return collective_matmul.matmul_reduce_scatter(hidden, down, AXIS)


FIRST_LINE = layer.__code__.co_firstlineno


def decisions_of(fun, *shapes: tuple[int, ...]) -> list[Decision]:
    arguments = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    with record_decisions() as decisions:
        jax.eval_shape(fun, *arguments)
    return decisions


def sharded_layer(mesh: Mesh):
    return jax.shard_map(
        layer, mesh=mesh, in_specs=(P(AXIS), P(None, AXIS), P(AXIS)), out_specs=P(AXIS)
    )


@pytest.mark.parametrize("remat", [False, True])
def test_both_passes_name_the_line_that_called_the_op(make_mesh: MeshFactory, remat: bool) -> None:
    mesh = make_mesh({AXIS: 2})
    sharded = jax.checkpoint(sharded_layer(mesh)) if remat else sharded_layer(mesh)

    def loss(*arrays):
        return sharded(*arrays).sum()

    decisions = decisions_of(jax.jit(jax.grad(loss, (0, 1, 2))), (8, 4), (4, 6), (6, 4))
    sites = [(d.site.op, d.site.direction, d.site.source) for d in decisions]
    up, down = (SourceLocation(__file__, FIRST_LINE + i, "layer") for i in (1, 2))
    assert set(sites) == {
        ("all_gather_matmul", "forward", up),
        ("matmul_reduce_scatter", "forward", down),
        ("all_gather_matmul", "backward", down),
        ("matmul_reduce_scatter", "backward", up),
    }


def test_lines_of_libraries_are_passed_over(make_mesh: MeshFactory) -> None:
    """The layers of this library call its ops; who called the layer is what is wanted."""
    from flax import nnx

    from collective_matmul.layers import ColumnParallelLinear

    linear = ColumnParallelLinear(4, 6, axis_name=AXIS, rngs=nnx.Rngs(0))
    with jax.set_mesh(make_mesh({AXIS: 2})):
        (decision,) = decisions_of(lambda x: linear(x), (8, 4))
    assert decision.site.source is not None
    assert decision.site.source.file == __file__
    assert "test_lines_of_libraries" in decision.site.source.function


def test_a_source_reads_well(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    inside, outside = tmp_path / "model" / "block.py", tmp_path.parent / "block.py"
    assert (
        str(SourceLocation(str(inside), 7, "Block.__call__"))
        == "model/block.py:7 in Block.__call__"
    )
    assert str(SourceLocation(str(outside), 7, "f")) == f"{outside}:7 in f"
