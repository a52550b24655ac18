"""The matmuls that the ring's cost model assumes, and those that a ring launches."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from collective_matmul.dispatch.tables import table_files
from collective_matmul.mosaic_gpu.hopper_matmul import chunk_matmul
from collective_matmul.ops.matmul.ring import cost
from tests.dispatch.sites import BFLOAT16, H200
from tests.reference import AXIS


def test_the_model_asks_for_the_matmuls_that_a_ring_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched, modelled = set(), set()
    monkeypatch.setattr(chunk_matmul, "choose_tiling", launched.add)  # None: no kernel is traced.
    monkeypatch.setattr(cost, "_has_tiling", modelled.add)
    monkeypatch.setattr(table_files, "known", lambda kind: [])

    def products(x: jax.Array, y: jax.Array, *ws: jax.Array) -> Any:
        gathered = all_gather_matmul(x, ws, AXIS, gather_dimension=1, implementation="ring")
        summed = matmul_reduce_scatter(y, ws[0], AXIS, scatter_dimension=2, implementation="ring")
        return *gathered, summed, matmul_all_reduce(y, ws[0], AXIS, implementation="ring")

    mesh = AbstractMesh((4,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=H200)
    mapped = jax.shard_map(products, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    shapes = (2, 64, 128), (3, 5, 256, 128), (128, 64), (128, 96)
    arguments = [jax.ShapeDtypeStruct(shape, BFLOAT16) for shape in shapes]
    jax.eval_shape(lambda *args: jax.vjp(mapped, *args)[1](mapped(*args)), *arguments)
    assert len(modelled) == 5  # The backward of an all-reduce has no ring.
    assert modelled == {problem for problem in launched if problem.x_contracted_axis == 2}
