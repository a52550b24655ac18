"""What differs, or is spelled unexpectedly, between the JAX versions supported."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Mesh axes over which `x` differs between devices, by its type.

    Empty wherever `shard_map` runs with ``check_vma=False``, since nothing is tracked there.
    """
    # Called `vma` before jax 0.10.
    return jax.typeof(x).manual_axis_type.varying


def tracks_varying_axes(axis_name: str) -> bool:
    """Whether the enclosing `shard_map` over `axis_name` has ``check_vma=True``."""
    return axis_name in varying_axes(lax.axis_index(axis_name))


def vary_over(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Types `x` as varying over `axes` too. Its transpose is the sum over the axes added."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def partly_automatic() -> bool:
    """Whether the compiler still shards arrays here over other mesh axes, as it sees fit."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)


def axis_index(axis_name: str) -> jax.Array:
    """This device's index along a manual axis."""
    if jax.__version_info__ >= (0, 11) or not partly_automatic():
        return lax.axis_index(axis_name)
    # jaxlib 0.10 cannot compile some programs of a few dozen shard_maps that leave axes automatic
    # and ask for an index ("PartitionId instruction is not supported for SPMD partitioning").
    # Scattering the sum of all indices says the same.
    devices = lax.axis_size(axis_name)
    return lax.psum_scatter(jnp.arange(devices, dtype=jnp.int32), axis_name) // devices
