"""Layers whose kernels a second mesh axis shards, as in fully sharded data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collective_matmul.layers import ColumnParallelLinear, RowParallelLinear
from tests.conftest import MeshFactory


@pytest.mark.parametrize("weight_dimension", [0, 1])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 2)])
def test_sharded_weights(
    weight_dimension: Literal[0, 1], sizes: tuple[int, int], make_mesh: MeshFactory
) -> None:
    """Two layers inside `shard_map`, with the specs that Flax reads from their parameters."""
    devices, weight_devices = sizes
    mesh = make_mesh({"fsdp": weight_devices, "tensor": devices})
    options: Any = {"weight_axis_name": "fsdp", "weight_dimension": weight_dimension}
    options |= {"dtype": jnp.bfloat16, "implementation": "ring", "rngs": nnx.Rngs(0)}
    up = ColumnParallelLinear(16, (8, 2), use_bias=True, **options)
    down = RowParallelLinear((8, 2), 16, use_bias=True, **options)
    graph, state = nnx.split((up, down))
    specs = nnx.get_partition_spec(state)

    def apply(state: nnx.State, x: jax.Array) -> jax.Array:
        up, down = nnx.merge(graph, state)
        return down(jnp.sin(up(x)))

    def reference(state: nnx.State, x: jax.Array) -> jax.Array:
        up, down = nnx.merge(graph, state)
        assert up.bias is not None and down.bias is not None
        y = jnp.sin(jnp.tensordot(x, up.kernel[...], 1) + up.bias[...][None, None])
        return jnp.tensordot(y, down.kernel[...], 2) + down.bias[...][None, None]

    x_spec = P("fsdp", "tensor")
    sharded = jax.shard_map(apply, mesh=mesh, in_specs=(specs, x_spec), out_specs=x_spec)
    x = jax.random.normal(jax.random.key(1), (4, 8, 16), jnp.bfloat16)

    def loss_of(fun: Callable) -> Callable:
        return lambda state, x: jnp.sum(jnp.square(fun(state, x).astype(jnp.float32)))

    gradients = jax.jit(jax.grad(loss_of(sharded)))(state, x)
    expected = jax.jit(jax.grad(loss_of(reference)))(state, x.astype(jnp.float32))
    for actual, wanted in zip(*map(jax.tree.leaves, (gradients, expected)), strict=True):
        assert actual.dtype == jnp.float32
        # Results and gradients are rounded to bfloat16 some ten times, each by 2⁻⁹ at most.
        np.testing.assert_allclose(actual, wanted, atol=0.04 * float(jnp.abs(wanted).max()))


def test_weights_are_sharded_over_another_axis() -> None:
    with pytest.raises(ValueError, match="weight_axis_name='tensor': that is axis_name too"):
        ColumnParallelLinear(8, 8, weight_axis_name="tensor", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="weight_dimension=2: expected 0"):
        dimension: Any = 2
        RowParallelLinear(
            8, 8, weight_axis_name="fsdp", weight_dimension=dimension, rngs=nnx.Rngs(0)
        )
