"""A Flax nnx model with sharding metadata, as in Flax's guide, on a mesh of Explicit axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import explain, overlap, overlap_jit
from tests.rewrite.explicit_programs import explicit_mesh
from tests.rewrite.programs import sites

FEATURES, HIDDEN = 8, 16
ROWS, WHOLE = P("data", "tensor"), P("data", None, "tensor")


class FeedForward(nnx.Module):
    """Metadata of parameters says how they are sharded, and calls say how results are."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.norm = nnx.RMSNorm(FEATURES, rngs=rngs)
        self.up = nnx.Linear(
            FEATURES,
            HIDDEN,
            kernel_init=nnx.with_partitioning(init, (None, "tensor")),
            use_bias=False,
            rngs=rngs,
        )
        self.down = nnx.Linear(
            HIDDEN,
            FEATURES,
            kernel_init=nnx.with_partitioning(init, ("tensor", None)),
            use_bias=False,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nnx.silu(self.up(self.norm(x), out_sharding=WHOLE))
        return x + self.down(hidden, out_sharding=ROWS)


class Model(nnx.Module):
    """Two layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([FeedForward(rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def step(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    """A training step."""
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def trained(jitted: Any) -> tuple[list[float], Any]:
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    x = jax.device_put(
        np.random.default_rng(0).standard_normal((4, 8, FEATURES), np.float32),
        NamedSharding(explicit_mesh(), ROWS),
    )
    return [float(jitted(model, optimizer, x)) for _ in range(3)], nnx.state(model)


def test_a_training_step_is_overlapped() -> None:
    with jax.set_mesh(explicit_mesh()):
        expected, parameters = trained(nnx.jit(step))
        actual, after = trained(overlap_jit(overlap(step, require=10, implementation="ring")))
    # Sums of a few float32 products in another order.
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(parameters), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_every_matmul_that_communicates_is_a_site() -> None:
    with jax.set_mesh(explicit_mesh()):
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
        x = jax.ShapeDtypeStruct(
            (4, 8, FEATURES), jnp.float32, sharding=NamedSharding(explicit_mesh(), ROWS)
        )
        found = sites(step, model, optimizer, x)
        table = str(explain(step)(model, optimizer, x))
    assert [site for site in found if not site.replaced] == []
    # Of each layer: a gather and a sum, forward; backward also a gather for the gradient of `up`.
    assert len(found) == 10, table
    assert "10 plain gathers and sums: 10 sites; pass the function to overlap" in table


def test_auto_axes_are_named() -> None:
    mesh = jax.make_mesh(
        (2, 2),
        ("data", "tensor"),
        (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit),
        devices=jax.devices()[:4],
    )
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=NamedSharding(mesh, P("tensor")))
        w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        table = str(explain(lambda x, w: jax.sharding.reshard(x, P()) @ w)(x, w))
    assert "mesh axes of type Auto show nothing: data" in " ".join(table.split())
