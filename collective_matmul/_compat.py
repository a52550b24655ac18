"""What differs, or is spelled unexpectedly, between the JAX versions supported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# In all of 0.10.2 to 0.12. `pl.kernel` is this without `input_output_aliases`; it updates in place
# only mutable references, which can neither vary over mesh axes nor stand inside `custom_vmap`.
from jax._src.pallas.mpmd import _mpmd_map


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


def in_place_kernel(
    body: Callable, mesh: Any, outs: Sequence[jax.Array], **kwargs: Any
) -> Callable:
    """`pl.kernel`, called as ``kernel(*operands)``, that returns `outs` with what `body` wrote.

    `body` gets references to the operands and to the outs. Elements it does not write stay as they
    are; the compiler copies an out only if its old value is needed afterwards.
    """

    def kernel(*operands: jax.Array) -> tuple[jax.Array, ...]:
        count = len(operands)

        def run(*refs: Any) -> None:
            # An out's reference as an operand is the same memory as its reference as a result.
            body(*refs[:count], *refs[count + len(outs) :])

        aliases = {count + i: i for i in range(len(outs))}
        types = tuple(map(jax.typeof, outs))
        call = _mpmd_map([(mesh, run)], types, input_output_aliases=aliases, **kwargs)
        return tuple(call(*operands, *outs))

    return kernel
