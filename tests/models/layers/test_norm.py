"""The norm, and when the gradient of its scale is computed."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from models.config import debug
from models.layers.norm import RMSNorm
from models.llama import Llama
from tests.conftest import MeshFactory
from tests.reference import AXIS

FEATURES = 16


def loss(beside: bool, scale: jax.Array, x: jax.Array) -> jax.Array:
    """Adds a residual stream and its norm."""
    norm = RMSNorm(FEATURES, epsilon=1e-5)
    norm.scale.set_value(scale)
    x, normed = norm.beside(x) if beside else (x, norm(x))
    return jnp.sum(jnp.sin(x + 3 * normed))


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_a_norm_beside_its_stream_has_the_same_gradients(
    devices: int, make_mesh: MeshFactory
) -> None:
    rng = np.random.default_rng(0)
    scale, x = rng.normal(size=FEATURES), rng.normal(size=(8, FEATURES))
    operands = np.float32(scale), np.float32(x)

    def gradients(beside: bool) -> Any:
        local = jax.grad(functools.partial(loss, beside), argnums=(0, 1))
        specs = P(), P(AXIS)
        sharded = jax.shard_map(
            local, mesh=make_mesh({AXIS: devices}), in_specs=specs, out_specs=specs
        )
        return jax.jit(sharded)(*operands)

    found = gradients(True)
    for beside, alone in zip(found, gradients(False), strict=True):
        np.testing.assert_array_equal(beside, alone)
    whole = jax.jit(jax.grad(functools.partial(loss, False), argnums=(0, 1)))(*operands)
    for beside, expected in zip(found, whole, strict=True):
        np.testing.assert_allclose(beside, expected, rtol=1e-5, atol=1e-6)  # Sums of few terms.


def test_gradients_wait_for_each_other_before_devices_add_theirs(make_mesh: MeshFactory) -> None:
    """Sums of one device take little memory, and sums over devices can be collected."""
    local = jax.grad(functools.partial(loss, True), argnums=(0, 1))
    specs = P(), P(AXIS)
    sharded = jax.shard_map(local, mesh=make_mesh({AXIS: 2}), in_specs=specs, out_specs=specs)
    (outer,) = jax.make_jaxpr(sharded)(jnp.ones(FEATURES), jnp.ones((8, FEATURES))).jaxpr.eqns
    equations = outer.params["jaxpr"].eqns
    names = [equation.primitive.name for equation in equations]
    *_, last = (i for i, name in enumerate(names) if name == "optimization_barrier")
    barrier = equations[last]
    assert [v.aval.shape for v in barrier.outvars] == [(4, FEATURES), (FEATURES,)]
    (total,) = (e for e in equations if e.primitive.name.startswith("psum"))
    assert total.invars[0] is barrier.outvars[1]


@pytest.mark.parametrize("rows", [(3, 5), (2, 128), (1,)])
def test_gradients_are_those_of_the_definition(rows: tuple[int, ...]) -> None:
    """Compares with float64, for numbers of rows that groups divide and others."""
    rng = np.random.default_rng(1)
    x, scale, dy = rng.normal(size=(*rows, 7)), rng.normal(size=7), rng.normal(size=(*rows, 7))

    def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
        norm = RMSNorm(7, epsilon=1e-2)
        norm.scale.set_value(scale)
        return norm(x)

    y, pull = jax.vjp(normed, jnp.float32(x), jnp.float32(scale))
    r = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-2)
    g = dy * scale
    expected = r * g - x * r**3 * np.mean(x * g, axis=-1, keepdims=True)
    np.testing.assert_allclose(y, x * r * scale, rtol=1e-5)
    dx, d_scale = pull(jnp.float32(dy))
    np.testing.assert_allclose(dx, expected, rtol=1e-4, atol=1e-5)  # Differences of terms.
    np.testing.assert_allclose(d_scale, (dy * x * r).reshape(-1, 7).sum(0), rtol=1e-4, atol=1e-5)


def test_sums_over_rows_are_made_in_groups() -> None:
    """XLA for GPUs computes these in one pass with the gradient of x."""

    def total(x: jax.Array, scale: jax.Array) -> jax.Array:
        norm = RMSNorm(FEATURES, epsilon=1e-5)
        norm.scale.set_value(scale)
        return jnp.sum(norm(x))

    x = jnp.ones((2, 128, FEATURES))
    jaxpr = jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(x, jnp.ones(FEATURES))
    found = re.findall(r":f32\[([\d,]+)\] = reduce_sum\[\s*axes=\((\d),\)", str(jaxpr))
    assert ("4,16", "1") in found and ("16", "0") in found


def test_norms_of_queries_and_keys_wait_too(make_mesh: MeshFactory) -> None:
    """XLA would sum the gradients of their scales at the end of the whole backward, and keep the
    queries and keys of all layers, and their gradients, until then."""
    config = dataclasses.replace(debug(), num_layers=1, query_key_norm=True)
    model = Llama(config, axis_name=AXIS, rngs=nnx.Rngs(0))
    block = model.layers[0]
    graph, state = nnx.split(block.attention)

    def local(state: nnx.State, x: jax.Array) -> jax.Array:
        attention = nnx.merge(graph, state)
        query, key, value = attention.heads(x, None)
        return jnp.sum(jnp.sin(query)) + jnp.sum(jnp.sin(key)) + jnp.sum(value)

    x = jnp.ones((1, 8, config.features), jnp.float32)
    specs = nnx.get_partition_spec(state), P(None, AXIS)
    loss = jax.grad(local)
    sharded = jax.shard_map(loss, mesh=make_mesh({AXIS: 2}), in_specs=specs, out_specs=specs[0])
    jaxpr = jax.make_jaxpr(sharded)(state, x).jaxpr
    barriers = [
        [v.aval.shape for v in equation.outvars]
        for equation in jaxpr.eqns[-1].params["jaxpr"].eqns
        if equation.primitive.name == "optimization_barrier"
    ]
    scale = (config.head_dim,)
    heads = config.num_heads // 2, config.num_key_value_heads // 2
    for count in heads:
        assert [(1, 8, count, config.head_dim), scale] in barriers
