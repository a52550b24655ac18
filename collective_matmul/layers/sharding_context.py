"""The two worlds a layer works in: on this device's shards, or on global arrays.

Inside a `jax.shard_map` over the tensor axis, parameters and activations are this device's shards.
Elsewhere they are global, and the layer enters `shard_map` itself. It makes the tensor axis manual
and leaves the other Auto axes to the compiler, so that a batch sharded over them stays so. Explicit
axes are part of an array's type, which `shard_map` wants repeated: they become manual too, with the
rows sharded as the type of x says and the parameters gathered. Axes of one device become manual
because a `shard_map` over the whole mesh is what compilers know best.

Called inside a `shard_map` over other axes alone, a layer enters another within it. JAX can then
differentiate it only where the outer one has ``check_vma=False``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

#: For each dimension before the features, the mesh axes that shard it, major first.
LeadingAxes = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class LocalShards:
    """Arrays are this device's shards; `axis_name` is manual already."""

    axis_name: str

    @property
    def devices(self) -> int:
        """The size of the axis."""
        return lax.axis_size(self.axis_name)

    @property
    def parameter_shards(self) -> int:
        """Into how many pieces the parameters are cut that a layer sees."""
        return self.devices

    def leading_axes(self, x: jax.Array, count: int) -> LeadingAxes:
        """What is known of how the first `count` dimensions of x are sharded: nothing."""
        return ((),) * count

    def shards(self, axes: tuple[str, ...]) -> int:
        """Into how many pieces a dimension over `axes` is still to be cut."""
        return 1

    def map_shards(self, fun: Callable, operands: Any, in_specs: Any, out_specs: Any) -> Any:
        """``fun(*operands)``."""
        return fun(*operands)


@dataclass(frozen=True)
class GlobalArrays:
    """Arrays are global, on `mesh`."""

    axis_name: str
    mesh: Mesh | AbstractMesh
    parameter_shards = 1

    @property
    def devices(self) -> int:
        """The size of the axis."""
        return self.mesh.shape[self.axis_name]

    def leading_axes(self, x: jax.Array, count: int) -> LeadingAxes:
        """The Explicit axes, other than ours, that shard the first `count` dimensions of x."""
        others = set(self._explicit_axes()) - {self.axis_name}
        named = (*_axes_of(jax.typeof(x).sharding.spec), *[()] * count)[:count]
        return tuple(tuple(axis for axis in axes if axis in others) for axes in named)

    def shards(self, axes: tuple[str, ...]) -> int:
        """Into how many pieces a dimension over `axes` is still to be cut."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def map_shards(self, fun: Callable, operands: Any, in_specs: Any, out_specs: Any) -> Any:
        """``fun(*operands)`` on every device's shards; `in_specs` is a pytree like `operands`."""
        single = (axis for axis in self.mesh.abstract_mesh.auto_axes if self.mesh.shape[axis] == 1)
        return jax.shard_map(
            fun,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={self.axis_name, *self._explicit_axes(), *single},
        )(*jax.tree.map(self._with_type_of, operands, in_specs))

    def _with_type_of(self, array: jax.Array, spec: P) -> jax.Array:
        """The array, sharded as its type must say where axes are Explicit."""
        explicit = self._explicit_axes()
        if not explicit:
            return array
        kept = (tuple(axis for axis in axes if axis in explicit) for axes in _axes_of(spec))
        return jax.sharding.reshard(array, NamedSharding(self.mesh, partition_spec(tuple(kept))))

    def _explicit_axes(self) -> tuple[str, ...]:
        return tuple(self.mesh.abstract_mesh.explicit_axes)


ShardingContext = LocalShards | GlobalArrays


def current_context(axis_name: str, mesh: Mesh | None) -> ShardingContext:
    """Where the caller is. `mesh` is for global arrays; None means that of `jax.set_mesh`.

    Raises:
      ValueError: if there is no mesh, or it has no such axis.
    """
    around = jax.sharding.get_abstract_mesh()
    if axis_name in around.manual_axes:
        return LocalShards(axis_name)
    # Inside a shard_map over other axes only the mesh around knows which those are.
    found = around if mesh is None or around.manual_axes else mesh
    if found.empty:
        raise ValueError(
            f"axis_name={axis_name!r}: there is no mesh here; call the layer inside"
            " `with jax.set_mesh(mesh):`, construct it with mesh=mesh, or call it inside"
            " jax.shard_map over that axis"
        )
    if axis_name not in found.axis_names:
        raise ValueError(
            f"axis_name={axis_name!r}: the mesh has the axes {tuple(found.axis_names)}; name one"
            " of them"
        )
    return GlobalArrays(axis_name, found)


def known_axis_size(axis_name: str, mesh: Mesh | None) -> int | None:
    """The size of the axis, or None where no mesh has it yet.

    Raises:
      ValueError: if `mesh` has no such axis.
    """
    around = jax.sharding.get_abstract_mesh()
    if mesh is None and axis_name not in around.axis_names:
        return None
    return current_context(axis_name, mesh).devices


def sharded(rows: LeadingAxes, dimension: int | None, axis_name: str) -> LeadingAxes:
    """`rows`, with the given dimension sharded over the axis too, as the minor one."""
    return tuple((*axes, axis_name) if i == dimension else axes for i, axes in enumerate(rows))


def partition_spec(rows: LeadingAxes, *features: str | None) -> P:
    """The spec of an array with these rows and feature dimensions."""
    return P(*(axes or None for axes in rows), *features)


def _axes_of(spec: P) -> LeadingAxes:
    """The axes that each entry of a spec names."""
    return tuple(
        () if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec
    )
