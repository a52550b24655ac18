"""Barriers between blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from models.blocks.barriers import tied
from tests.conftest import MeshFactory


def test_arrays_of_several_types_are_tied_and_keep_them(make_mesh: MeshFactory) -> None:
    """Activations vary over more axes than gradients that were summed."""
    axes = []

    def fun(x: jax.Array, matrix: jax.Array, vector: jax.Array) -> tuple:
        x, (matrix, vector) = tied(x, [matrix, vector])
        axes.extend(jax.typeof(each).manual_axis_type.varying for each in (x, matrix, vector))
        return x, matrix, vector

    mesh = make_mesh({"data": 2, "tensor": 2})
    specs = P(("data", "tensor")), P("tensor"), P()
    eager = jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=specs)
    sharded = jax.jit(eager)
    arguments = jnp.ones((4, 2)), jnp.ones((4, 3)), jnp.ones(2)
    barrier = [e for e in sharded.lower(*arguments).as_text().splitlines() if "_barrier" in e]
    assert axes == [{"data", "tensor"}, {"tensor"}, frozenset()]
    assert len(barrier) == 1 and "tensor<1x2xf32>, tensor<2x3xf32>" in barrier[0]
    for compute in (sharded, eager):
        for result, argument in zip(compute(*arguments), arguments, strict=True):
            assert (result == argument).all()
