"""Places arrays on the mesh: values, shapes without values, and arrays of a program."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul.layers.sharding_context import has_explicit_axes, with_auto_axes


def mesh_of_arrays(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh | None:
    """The mesh that global arrays are to be placed on.

    None inside a `shard_map`, where arrays are shards, and where no mesh is known. A given mesh has
    Auto axes outside `jax.set_mesh`: see `sharding_context`.

    Args:
      mesh: None uses the mesh of `jax.set_mesh`.
    """
    around = jax.sharding.get_abstract_mesh()
    if around.manual_axes:
        return None
    if mesh is not None:
        return with_auto_axes(mesh) if around.empty else mesh
    if around.empty:
        return None
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # Inside jit, where the abstract mesh is enough.
        return around


def place(value: Any, mesh: Mesh | AbstractMesh, spec: P) -> Any:
    """`value` with the sharding ``NamedSharding(mesh, spec)``.

    Args:
      value: an array, an array inside `jax.jit`, or a `jax.ShapeDtypeStruct`. Anything else is
        returned as it is, and so is an array inside `jax.jit` if the spec names no axis.
      mesh: the mesh.
      spec: names axes of the mesh.
    """
    sharding = NamedSharding(mesh, spec)
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    if isinstance(value, Tracer):
        if not _axes_of(spec):  # Its sharding may have been chosen before; that is not visible.
            return value
        if has_explicit_axes(value):
            return jax.sharding.reshard(value, NamedSharding(jax.typeof(value).sharding.mesh, spec))
        if mesh.abstract_mesh.explicit_axes:
            return jax.sharding.reshard(value, sharding)
        return jax.lax.with_sharding_constraint(value, sharding)
    if isinstance(value, jax.Array) and isinstance(mesh, Mesh):
        return jax.device_put(value, sharding)
    return value


def keep_heads_divided(
    cache: jax.Array, heads: jax.Array, axis_name: str, mesh: Mesh | AbstractMesh
) -> jax.Array:
    """A cache of keys or values inside a program, with its heads divided over the axis.

    Args:
      cache: [*batch, length, heads, features].
      heads: the new keys or values, [*batch, 1, heads, features]. The batch of the cache is sharded
        like theirs.
      axis_name: the mesh axis.
      mesh: the mesh.
    """
    type_of_heads = jax.typeof(heads).sharding
    if type_of_heads.mesh.explicit_axes:
        # Writing into the cache requires that the types agree.
        *batch, _, _, _ = type_of_heads.spec
        typed = type_of_heads.mesh
        if not isinstance(heads, Tracer) and isinstance(heads.sharding, NamedSharding):
            typed = heads.sharding.mesh
        return jax.sharding.reshard(cache, NamedSharding(typed, P(*batch, None, axis_name, None)))
    if isinstance(cache, Tracer):
        free = [P.UNCONSTRAINED] * (cache.ndim - 2)
        spec = P(*free, axis_name, P.UNCONSTRAINED)
        return jax.lax.with_sharding_constraint(cache, NamedSharding(mesh, spec))
    return cache


def place_variables(model: nnx.Module, mesh: Mesh | AbstractMesh) -> None:
    """Places every variable of a model: as its metadata say, else replicated.

    Inside `jax.jit` variables without metadata are left to the compiler.

    A variable without such metadata that is on all devices of the mesh already stays as it is.
    """
    for _, variable in nnx.iter_graph(model):
        if not isinstance(variable, nnx.Variable):
            continue
        value, spec = variable.get_value(), nnx.get_partition_spec(variable)
        spec = spec.get_value() if isinstance(spec, nnx.Variable) else spec
        if variable.get_metadata().get("out_sharding") is None and _is_on(value, mesh):
            spec = value.sharding.spec
        if _axes_of(spec) <= set(mesh.axis_names):
            variable.set_value(place(value, mesh, spec))


def _is_on(value: Any, mesh: Mesh | AbstractMesh) -> bool:
    sharding = getattr(value, "sharding", None)
    return isinstance(sharding, NamedSharding) and with_auto_axes(sharding.mesh) == with_auto_axes(
        mesh
    )


def _axes_of(spec: P) -> set[str]:
    """The axes that a spec names."""
    return set(jax.tree.leaves(tuple(spec)))
