"""What differs, or is spelled unexpectedly, between the JAX versions supported."""

from __future__ import annotations

import jax
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
