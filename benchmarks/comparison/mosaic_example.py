"""JAX's own example of a fused all-gather and matmul, for comparison: one Mosaic kernel for Hopper.

`jax.experimental.pallas.ops.gpu.collective_matmul_mgpu` multiplies the chunk it has while it writes
it to the next device's memory. It uses plain peer writes, no NVLink multicast. There is no
reduce-scatter, and no gradient.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jax.experimental.pallas.ops.gpu.collective_matmul_mgpu import TuningConfig

_TILE_K = 64
_STAGES = 4
#: Rows and columns of a warpgroup's tile, and the dimension along which two of them share a block:
#: the tiles of the example's own tuning that fit into shared memory, larger first.
_TILES = ((128, 128, "N"), (128, 128, "M"), (128, 64, "N"), (128, 64, "M"))
#: The width of the stripes in which tiles are visited.
_GRID_TILE_WIDTH = 8


def all_gather_matmul(x: jax.Array, w: jax.Array, axis_name: str) -> jax.Array:
    """x [M/D, K] gathered along its rows, times w [K, N] -> [M, N]; inside `jax.shard_map`.

    Args:
      x: a shard of the rows, bfloat16 or float16.
      w: local, of x's dtype.
      axis_name: an axis over all devices, all of them this process's.

    Raises:
      ValueError: if the example cannot run these shapes.
    """
    sizes = x.shape[0], x.shape[1], w.shape[1]
    if reason := unsupported_reason(*sizes, x.dtype, lax.axis_size(axis_name)):
        raise ValueError(f"JAX's Mosaic example: {reason}")
    config = tuning_config(*sizes)
    assert config is not None
    return _example().all_gather_lhs_matmul(x, w, axis_name, config=config, dtype=x.dtype)


def unsupported_reason(m: int, k: int, n: int, dtype: Any, devices: int) -> str | None:
    """Why the example cannot run, or None; sizes are local."""
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"dtype {jnp.dtype(dtype).name}: it takes bfloat16 and float16"
    if devices != jax.device_count():
        return f"an axis of {devices} devices: it must span all {jax.device_count()}"
    if jax.process_count() != 1:
        return f"{jax.process_count()} processes: without NVSHMEM one must have all GPUs"
    try:
        config = tuning_config(m, k, n)
    except ImportError as error:
        return f"this version of JAX lacks it: {error}"
    if config is None:
        return (
            f"local sizes m={m}, k={k}, n={n}: they must be multiples of 128, {_TILE_K} and 128,"
            f" or of 256, {_TILE_K} and 64"
        )
    return None


def tuning_config(m: int, k: int, n: int) -> TuningConfig | None:
    """The largest tile of the example's own tuning that divides the local sizes; None if none does.

    Raises:
      ImportError: if this version of JAX does not have the example.
    """
    example = _example()
    dimensions = {"M": example.MatmulDimension.M, "N": example.MatmulDimension.N}
    for tile_m, tile_n, shared in _TILES:
        block_m, block_n = tile_m * (1 + (shared == "M")), tile_n * (1 + (shared == "N"))
        if m % block_m == n % block_n == k % _TILE_K == 0:
            return example.TuningConfig(
                tile_m=tile_m,
                tile_n=tile_n,
                tile_k=_TILE_K,
                max_concurrent_steps=_STAGES,
                grid_minor_dim=dimensions["N"],
                grid_tile_width=_GRID_TILE_WIDTH,
                wg_dimension=dimensions[shared],
            )
    return None


@functools.cache
def _example():
    # Not at the top: it brings in a good part of Pallas, and may move between versions of JAX.
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu

    return collective_matmul_mgpu
