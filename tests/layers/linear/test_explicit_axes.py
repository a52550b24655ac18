"""Parallel layers on a mesh with Explicit axes, JAX's default, in models not written for them."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import overlap_jit
from collective_matmul._compat import ShardingTypeError
from collective_matmul.layers import Column, Row
from collective_matmul.layers.parallelize.parallelize import parallelize

FEATURES, HEADS = 8, 2
PLAN = {"up": Column(), "down": Row()}


@pytest.fixture
def explicit() -> Mesh:
    """A mesh as `jax.make_mesh` returns it."""
    return jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])


def attention(x: jax.Array, projected: jax.Array) -> jax.Array:
    """A user's own, from einsums and JAX's function. [batch, sequence, features]."""
    q = k = v = projected.reshape(*x.shape[:-1], HEADS, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return (y + jax.nn.dot_product_attention(q, k, v, is_causal=True)).reshape(x.shape)


class Block(nnx.Module):
    """A feed-forward layer and then attention, which is not parallel."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.up = nnx.Linear(FEATURES, 16, rngs=rngs)
        self.down = nnx.Linear(16, FEATURES, rngs=rngs)
        self.project = nnx.Linear(FEATURES, FEATURES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x += self.down(jax.nn.gelu(self.up(self.norm(x))))
        return x + attention(x, self.project(x))


class LinenBlock(linen.Module):
    """The layers of `Block` in linen."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = linen.Dense(16, name="up")(linen.LayerNorm()(x))
        x += linen.Dense(FEATURES, name="down")(jax.nn.gelu(hidden))
        return x + attention(x, linen.Dense(FEATURES)(x))


def data() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (4, 8, FEATURES))


def train_step(model: Block, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def trained(model: Block, x: jax.Array, jit: Any) -> list[float]:
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = jit(train_step)
    return [float(step(model, optimizer, x)) for _ in range(2)]


def test_nnx_model_with_a_users_own_attention(explicit: Mesh) -> None:
    model = parallelize(Block(), PLAN, mesh=explicit, implementation="ring")
    expected = trained(Block(), data(), nnx.jit)
    # Sums of a few float32 products in another order.
    np.testing.assert_allclose(trained(model, data(), overlap_jit), expected, rtol=1e-5)


def test_linen_model_with_a_users_own_attention(explicit: Mesh) -> None:
    plain, x = LinenBlock(), data()
    model = parallelize(plain, PLAN, mesh=explicit, implementation="ring")
    variables = model.init(jax.random.key(0), x)
    reference = jax.jit(plain.init)(jax.random.key(0), x)

    def gradients(module: Any) -> Any:
        return lambda variables, x: jax.grad(lambda v: jnp.mean(module.apply(v, x) ** 2))(variables)

    actual = overlap_jit(gradients(model))(variables, x)
    expected = jax.jit(gradients(plain))(reference, x)
    # Sums of up to 32 float32 products in another order.
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=1e-5), actual, expected)


def test_arrays_whose_types_are_explicit_stay_so(explicit: Mesh) -> None:
    """The parameters follow, and get gradients in their own type."""
    model = Block()
    feed_forward = nnx.Sequential(model.up, jax.nn.gelu, model.down)
    gradients = overlap_jit(nnx.grad(lambda model, x: jnp.mean(model(x) ** 2)))
    expected = nnx.to_pure_dict(gradients(feed_forward, data()))
    parallelize(feed_forward, {"layers.0": Column(), "layers.2": Row()}, mesh=explicit)
    x = jax.device_put(data(), NamedSharding(explicit, P("data")))
    assert jax.typeof(feed_forward(x)).sharding.spec == P("data", "tensor", None)
    actual = nnx.to_pure_dict(gradients(feed_forward, x))
    # Sums of up to 32 float32 products in another order.
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=1e-5), actual, expected)


def test_variables_on_the_mesh_keep_their_sharding(explicit: Mesh) -> None:
    model = Block()
    halves = NamedSharding(explicit, P("data"))
    model.project.kernel.set_value(jax.device_put(model.project.kernel[...], halves))
    parallelize(model, PLAN, mesh=explicit)
    sharding = model.project.kernel[...].sharding
    assert sharding.is_equivalent_to(halves, 2)
    assert not jax.typeof(model.project.kernel[...]).sharding.mesh.explicit_axes


@pytest.mark.parametrize(
    ("use", "is_set"), [("__call__", True), ("lower", True), ("trace", False), ("eval_shape", True)]
)
def test_errors_of_explicit_axes_name_the_fix(use: str, is_set: bool, explicit: Mesh) -> None:
    x = data()
    with jax.set_mesh(explicit) if is_set else contextlib.nullcontext():
        model = parallelize(Block(), PLAN, mesh=None if is_set else explicit)
        if not is_set:
            x = jax.device_put(x, NamedSharding(explicit, P("data")))
        with pytest.raises((ShardingTypeError, ValueError)) as caught:
            getattr(overlap_jit(lambda model, x: model(x)), use)(model, x)
    assert any("axis_types=(jax.sharding.AxisType.Auto,)" in n for n in caught.value.__notes__)
