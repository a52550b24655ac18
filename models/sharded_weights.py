"""Weights sharded over a mesh axis whose devices have sequences of their own.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020. A
weight is gathered before it is used, and its gradient is scattered: each device gets the sum, over
the axis, of its own shard.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True)
class WeightShards:
    """How one weight is sharded over an axis of size D.

    Attributes:
      axis_name: the mesh axis.
      dimension: the dimension of the weight that the axis shards, of local size n.
      dtype: dtype of the gathered weight. A shard is cast before it travels.
      gradient_dtype: dtype in which gradients travel and are summed.
    """

    axis_name: str
    dimension: int
    dtype: str
    gradient_dtype: str

    def gather(self, shard: jax.Array) -> jax.Array:
        """float32 [..., n, ...] -> [..., D*n, ...] in `dtype`. Its gradient is scattered."""
        return _gather(shard, self)

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """The sum of all devices' gradients: any dtype [..., D*n, ...] -> float32 [..., n, ...]."""
        shard = lax.psum_scatter(
            gradient.astype(self.gradient_dtype),
            self.axis_name,
            scatter_dimension=self.dimension,
            tiled=True,
        )
        return shard.astype(jnp.float32)

    def attach(self, shard: jax.Array, weight: jax.Array) -> jax.Array:
        """The weight [..., D*n, ...], gathered before. Its gradient is scattered to the shard."""
        return _attach(shard, weight, self)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(shard: jax.Array, shards: WeightShards) -> jax.Array:
    return lax.all_gather(
        shard.astype(shards.dtype), shards.axis_name, axis=shards.dimension, tiled=True
    )


def _gather_forward(shard: jax.Array, shards: WeightShards) -> tuple[jax.Array, None]:
    return _gather(shard, shards), None


def _gather_backward(shards: WeightShards, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (shards.scatter(gradient),)


_gather.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attach(shard: jax.Array, weight: jax.Array, shards: WeightShards) -> jax.Array:
    del shard, shards
    return weight


def _attach_forward(
    shard: jax.Array, weight: jax.Array, shards: WeightShards
) -> tuple[jax.Array, None]:
    return _attach(shard, weight, shards), None


def _attach_backward(shards: WeightShards, _: None, gradient: jax.Array) -> tuple[jax.Array, None]:
    return shards.scatter(gradient), None


_attach.defvjp(_attach_forward, _attach_backward)


def sharded_spec(shape: Sequence[int], spec: P, axis_name: str, sizes: Mapping[str, int]) -> P:
    """The spec of a parameter that an axis shards in addition.

    Takes the largest dimension that no other axis shards, if the axis divides it; else the largest
    of which it divides the shards. For the kernels of a transformer that is the width of the
    residual stream. Vectors, and what the axis does not divide, stay as they are.

    Args:
      shape: global shape of the parameter.
      spec: the axes that shard it, at most one for each dimension.
      axis_name: the axis to add.
      sizes: size of each axis of the mesh.

    Returns:
      A spec with as many entries as dimensions, or `spec`.
    """
    names = [*spec, *[None] * (len(shape) - len(spec))]

    def local_size(dimension: int) -> int:
        return shape[dimension] // sizes.get(names[dimension], 1)

    dimensions = [d for d in range(len(shape)) if local_size(d) % sizes[axis_name] == 0]
    if len(shape) < 2 or not dimensions:
        return spec
    chosen = max(dimensions, key=lambda d: (names[d] is None, shape[d], -d))
    names[chosen] = axis_name if names[chosen] is None else (names[chosen], axis_name)
    return P(*names)


def sharded_dimension(spec: P, axis_name: str | None) -> int | None:
    """The dimension that an axis shards, or None."""
    for dimension, names in enumerate(spec):
        if axis_name in (names if isinstance(names, tuple) else (names,)):
            return dimension
    return None
