"""Explicit mesh axes inside a `shard_map` that makes only some axes manual.

Arrays are then typed with their sharding over the explicit axes, and JAX asks for the sharding of
every result that it cannot infer. The ops treat such axes as automatic: the compiler keeps arrays
sharded over them. Each result is typed again as its operands tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray
from jax.sharding import AxisType, PartitionSpec

from collective_matmul._compat import axis_index, axis_indices

#: The mesh axes that shard a dimension: one name, several, or None.
Entry = str | tuple[str, ...] | None


def with_auto_axes(fun: Callable[..., Any], result_specs: Callable[[], Any], *args: Any) -> Any:
    """``fun(*args)``, where explicit mesh axes are automatic.

    JAX cannot store residuals that were computed there, so call it within custom gradients only.

    Args:
      fun: a function of pytrees of arrays.
      result_specs: returns a prefix of the pytree of results with a `PartitionSpec` for each. A
        dimension that its axes do not divide, as in a chunk of few rows, is not sharded.
      args: its arguments; what is not an array is passed on unchanged.
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = mesh.explicit_axes
    if not explicit:
        return fun(*args)
    indices = {axis: axis_index(axis) for axis in mesh.manual_axes}
    # Loops compute first what depends on no operand, and cannot keep it if it is computed below.
    arrays = [leaf for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array)]
    indices, _ = lax.optimization_barrier((indices, arrays))
    with jax.sharding.use_abstract_mesh(
        mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto))
    ):
        indices, args = _typed(PartitionSpec(), (indices, args))
        with axis_indices(indices):
            results = fun(*args)
    return jax.tree.map(_typed, result_specs(), results)


def _typed(spec: PartitionSpec, arrays: Any) -> Any:
    """The arrays, sharded over explicit axes by the spec where these divide them."""

    def typed(array: Any) -> Any:
        if not isinstance(array, jax.Array):
            return array
        dimensions = tuple(spec) + (None,) * (array.ndim - len(spec))
        divided = map(_where_divisible, dimensions, array.shape)
        return jax.sharding.reshard(array, PartitionSpec(*divided))

    return jax.tree.map(typed, arrays)


def _where_divisible(entry: Entry, size: int) -> Entry:
    mesh = jax.sharding.get_abstract_mesh()
    names = (entry,) if isinstance(entry, str) else entry or ()
    return None if size % math.prod(mesh.shape[name] for name in names) else entry


def entries(array: Any) -> tuple[Entry, ...]:
    """The explicit axes that shard each dimension of an array or an array type."""
    kind = array if isinstance(array, ShapedArray) else jax.typeof(array)
    partitions = tuple(kind.sharding.spec.partitions)
    return partitions + (None,) * (len(kind.shape) - len(partitions))


def specs_like(arrays: Any) -> Any:
    """The specs of arrays, in their pytree."""
    return jax.tree.map(lambda array: spec_of(entries(array)), arrays)


def spec_of(dimensions: Sequence[Entry]) -> PartitionSpec:
    """The spec of a result with these dimensions. An axis can shard only the first that has it."""
    used: set[str] = set()
    spec = []
    for entry in dimensions:
        names = (entry,) if isinstance(entry, str) else entry or ()
        free = tuple(name for name in names if name not in used)
        used.update(free)
        spec.append(free or None)
    return PartitionSpec(*spec)


def product_spec(x: Any, w: Any, transpose_w: bool = False) -> PartitionSpec:
    """The spec of x [..., K] times w [K, N], or [N, K] if transposed: of x's rows, w's columns."""
    return spec_of((*entries(x)[:-1], entries(w)[0 if transpose_w else 1]))


def columns_spec(x: Any, y: Any) -> PartitionSpec:
    """The spec of xᵀ y [K, N], contracted over all rows of x [..., K] and y [..., N]."""
    return spec_of((entries(x)[-1], entries(y)[-1]))


def with_type_of(array: Any, result: jax.Array) -> jax.Array:
    """The result, sharded over explicit axes as the array is."""
    if not jax.sharding.get_abstract_mesh().explicit_axes or entries(array) == entries(result):
        return result
    return jax.sharding.reshard(result, specs_like(array))
