"""What bulk ops communicate by: XLA's collectives, or our own for little data."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul.backends.one_shot import exchange_kernel


class Collectives(NamedTuple):
    """All are called inside `jax.shard_map`; D devices are on the axis.

    Attributes:
      all_gather: ``(x, axis_name, dimension)``: [..., m, ...] -> [..., D*m, ...].
      reduce_scatter: ``(x, axis_name, dimension)``: [..., D*m, ...] -> [..., m, ...].
      all_reduce: ``(x, axis_name)``: [...] -> [...], typed as replicated over the axis.
    """

    all_gather: Callable[[jax.Array, str, int], jax.Array]
    reduce_scatter: Callable[[jax.Array, str, int], jax.Array]
    all_reduce: Callable[[jax.Array, str], jax.Array]


def _all_gather_by_xla(x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
    return lax.all_gather(x, axis_name, axis=dimension, tiled=True)


def _reduce_scatter_by_xla(x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
    return lax.psum_scatter(x, axis_name, scatter_dimension=dimension, tiled=True)


def _all_gather_in_one_shot(x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
    shards = jnp.moveaxis(exchange_kernel.all_gather(x, axis_name), 0, dimension)
    whole = list(x.shape)
    whole[dimension] *= lax.axis_size(axis_name)
    return shards.reshape(whole)


def _reduce_scatter_in_one_shot(x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
    before, after = x.shape[:dimension], x.shape[dimension + 1 :]
    shards = x.reshape(*before, lax.axis_size(axis_name), -1, *after)
    return exchange_kernel.reduce_scatter(jnp.moveaxis(shards, dimension, 0), axis_name)


def _all_reduce_in_one_shot(x: jax.Array, axis_name: str) -> jax.Array:
    """In one exchange; in two, which send less together, where that takes less time."""
    devices = lax.axis_size(axis_name)
    if not exchange_kernel.is_two_shot(x.nbytes, devices):
        return exchange_kernel.all_reduce(x, axis_name)
    parts = jnp.pad(x.reshape(-1), (0, -x.size % devices)).reshape(devices, -1)
    sums = exchange_kernel.reduce_scatter(parts, axis_name)
    whole = exchange_kernel.all_gather(sums, axis_name, replicated=True)
    return whole.reshape(-1)[: x.size].reshape(x.shape)


XLA = Collectives(_all_gather_by_xla, _reduce_scatter_by_xla, lax.psum)
ONE_SHOT = Collectives(
    _all_gather_in_one_shot, _reduce_scatter_in_one_shot, _all_reduce_in_one_shot
)
