"""What differs, or is spelled unexpectedly, between the JAX versions supported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# In all of 0.10.2 to 0.12: what is lowered for certain devices is cached for these alone.
from jax._src.dispatch import prim_requires_devices_during_lowering

# In all of 0.10.2 to 0.12. `pl.kernel` is this without `input_output_aliases`; it updates in place
# only mutable references, which can neither vary over mesh axes nor stand inside `custom_vmap`.
from jax._src.pallas.mpmd import _mpmd_map
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir


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


_device_constant = Primitive("device_constant")


def device_constant(
    make: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """An array of this shape that is made of the devices of the mesh, when these are known.

    They are when the program is lowered; what JAX traces it keeps for all meshes of one shape.
    Called inside `jax.shard_map`.

    Args:
      make: a hashable function of an array of devices, in the shape of the mesh.
      shape: of the array.
      dtype: of the array.

    Raises:
      ValueError: when lowered, if the mesh has no devices then, or the program is exported.
    """
    return _device_constant.bind(make=make, shape=shape, dtype=np.dtype(dtype))


@_device_constant.def_abstract_eval
def _(*, make: Any, shape: tuple[int, ...], dtype: np.dtype) -> ShapedArray:
    del make
    return ShapedArray(shape, dtype)


def _lower_device_constant(
    context: mlir.LoweringRuleContext, *, make: Any, shape: tuple[int, ...], dtype: np.dtype
) -> Any:
    module = context.module_context
    mesh = getattr(module.axis_context, "mesh", None)
    if module.lowering_parameters.for_export or not isinstance(mesh, jax.sharding.Mesh):
        what = f"a program for {mesh} without devices" if mesh else "a program outside a mesh"
        raise ValueError(
            f"{'an exported program' if module.lowering_parameters.for_export else what}:"
            " addresses of memory are those of one process's devices; set the jax.sharding.Mesh"
            " with jax.set_mesh (a jax.shard_map within another knows its devices only so), or"
            " give it to jax.shard_map, or compile without peer_kernels=True"
        )
    value = make(mesh.devices)
    assert value.shape == shape and value.dtype == dtype
    return [mlir.ir_constant(value)]


mlir.register_lowering(_device_constant, _lower_device_constant)
prim_requires_devices_during_lowering.add(_device_constant)
