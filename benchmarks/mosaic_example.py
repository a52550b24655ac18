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
#: Rows and columns of a warpgroup's tile, and the dimension along which two of them share a block.
#: Those of the example's own tuning that fit into shared memory, larger first.
_TILES = ((128, 128, "N"), (128, 128, "M"), (128, 64, "N"), (128, 64, "M"))
#: The order of the tiles: the dimension that changes fastest, within stripes this wide.
_ORDERS = (("N", 8), ("N", 4), ("N", 16), ("M", 8), ("M", 4), ("M", 16))


def all_gather_matmul(
    x: jax.Array, w: jax.Array, axis_name: str, *, config: TuningConfig | None = None
) -> jax.Array:
    """x [M/D, K] gathered along its rows, times w [K, N] -> [M, N]; inside `jax.shard_map`.

    Args:
      x: a shard of the rows, bfloat16 or float16.
      w: local, of x's dtype.
      axis_name: an axis over all devices, all of them this process's.
      config: one of `configurations`; default: the first.

    Raises:
      ValueError: if `refusal` has a reason for these shapes.
    """
    devices = lax.axis_size(axis_name)
    if reason := refusal(x.shape[0], x.shape[1], w.shape[1], x.dtype, devices):
        raise ValueError(f"JAX's Mosaic example: {reason}")
    if config is None:
        config = next(iter(configurations(x.shape[0], x.shape[1], w.shape[1]).values()))
    kernel = _example().all_gather_lhs_matmul
    return kernel(x, w, axis_name, config=config, dtype=x.dtype)


def refusal(rows: int, contracted: int, columns: int, dtype: Any, devices: int) -> str | None:
    """Why the example cannot run, or None; sizes are one device's."""
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"dtype {jnp.dtype(dtype).name}: it takes bfloat16 and float16"
    if devices != jax.device_count():
        return f"an axis of {devices} devices: it must span all {jax.device_count()}"
    if jax.process_count() != 1:
        return f"{jax.process_count()} processes: without NVSHMEM one must have all GPUs"
    try:
        fitting = configurations(rows, contracted, columns)
    except ImportError as error:
        return f"this version of JAX lacks it: {error}"
    if not fitting:
        return (
            f"rows={rows}, contracted={contracted}, columns={columns} on a device: they must be"
            f" multiples of 128, {_TILE_K} and 128, or of 256, {_TILE_K} and 64"
        )
    return None


def configurations(rows: int, contracted: int, columns: int) -> dict[str, TuningConfig]:
    """The example's own tuning space, as far as it fits the sizes of one device, best guess first.

    Raises:
      ImportError: if this version of JAX does not have the example.
    """
    example = _example()
    dimensions = {"M": example.MatmulDimension.M, "N": example.MatmulDimension.N}
    fitting = {}
    for tile_m, tile_n, shared in _TILES:
        block_m, block_n = tile_m * (1 + (shared == "M")), tile_n * (1 + (shared == "N"))
        if rows % block_m or columns % block_n or contracted % _TILE_K:
            continue
        for minor, width in _ORDERS:
            fitting[f"{block_m}x{block_n}, {minor} in stripes of {width}"] = example.TuningConfig(
                tile_m=tile_m,
                tile_n=tile_n,
                tile_k=_TILE_K,
                max_concurrent_steps=_STAGES,
                grid_minor_dim=dimensions[minor],
                grid_tile_width=width,
                wg_dimension=dimensions[shared],
            )
    return fitting


@functools.cache
def _example():
    # Not at the top: it brings in a good part of Pallas, and may move between versions of JAX.
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu

    return collective_matmul_mgpu
