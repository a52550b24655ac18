"""References, comparisons and sharding contexts for the tests of the layers.

Arrays are compared within 1e-5 of their largest value. A sum of up to 64 float32 terms in another
order is off by at most 64 · 2⁻²⁴ = 4e-6 of them. A chunk that is lost, doubled or misplaced is off
by about the largest value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SHARDED = P("data", "tensor")
CONTEXTS = ("auto", "explicit", "local", "local_unchecked")


def exhaustive(value: Any) -> Any:
    """A value of a parameter that only exhaustive runs take."""
    return pytest.param(value, marks=pytest.mark.exhaustive)


def assert_close(actual: Any, expected: Any) -> None:
    """Compares two pytrees of arrays, leaf by leaf."""

    def compare(a: Any, b: Any) -> None:
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert a.shape == b.shape
        assert np.max(np.abs(a - b)) <= 1e-5 * np.max(np.abs(b))

    jax.tree.map(compare, actual, expected)


def assert_identical(actual: Any, expected: Any) -> None:
    """Compares two pytrees of arrays bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def random(*shape: int, seed: int = 0) -> Any:
    """Normal float32 values, typed as jax arrays for the layers."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def result_and_gradients(fun: Callable, *arguments: Any) -> tuple:
    """The result of fun, and the gradients of a weighted sum of it."""

    def loss(*arguments: Any) -> tuple[jax.Array, jax.Array]:
        y = fun(*arguments)
        return jnp.sum(y * np.cos(np.arange(y.size, dtype=np.float32)).reshape(y.shape)), y

    gradients, y = jax.jit(jax.grad(loss, tuple(range(len(arguments))), has_aux=True))(*arguments)
    return y, *gradients


def pure(tree: Any) -> Any:
    """The bare arrays of a state, by path."""
    return nnx.to_pure_dict(tree)


def outcome(
    model: nnx.Module, x: Any, context: str, mesh: Mesh, spec: P = SHARDED
) -> tuple[Any, Any, Any]:
    """The model's result and its gradients by parameters and x, global, computed in one context.

    Dimension 0 of x is sharded over the axis "data". Inside `shard_map` x and the result are
    sharded by `spec`.
    """
    graph, state = nnx.split(model)

    def call(state: nnx.State, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(x)

    around: Any = contextlib.nullcontext()
    if context in ("local", "local_unchecked"):
        call = jax.shard_map(
            call,
            mesh=mesh,
            in_specs=(nnx.get_partition_spec(state), spec),
            out_specs=spec,
            check_vma=context == "local",
        )
    else:
        kind = AxisType.Explicit if context == "explicit" else AxisType.Auto
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * len(mesh.axis_names))
        around = jax.set_mesh(mesh)
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        state = jax.device_put(state, nnx.get_named_sharding(state, mesh))
    with around:
        y, by_state, by_x = result_and_gradients(call, state, x)
    return y, pure(by_state), by_x


def unsharded_outcome(model: nnx.Module, x: Any) -> tuple[Any, Any, Any]:
    """The result and gradients of `outcome` for a model without a mesh, on one device."""
    graph, state = nnx.split(model)
    y, by_state, by_x = result_and_gradients(lambda s, x: nnx.merge(graph, s)(x), state, x)
    return y, pure(by_state), by_x
