"""Sums of arrays over a mesh axis, scattered by copies between peers.

A reduce-scatter of XLA sends what it adds, in the dtype of the sum, and its kernels take
multiprocessors from matmuls. Here each term travels in its own dtype, straight to its owner, by the
copies that rings consist of.
"""

from __future__ import annotations

import jax
import numpy as np
from jax import lax

from collective_matmul._compat import axis_index
from collective_matmul.operands.arithmetic import add


def scattered_sum(
    term: jax.Array, axis_name: str, dimension: int, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """This device's shard of the sum of all terms, in `dtype`, rounded once.

    Args:
      term: this device's, whole along the dimension that is scattered.
      axis_name: the mesh axis to sum over.
      dimension: the dimension to scatter.
      dtype: of the result. Terms travel in it if it is narrower than theirs.
    """
    dtype, devices = np.dtype(dtype), lax.axis_size(axis_name)
    if dtype.itemsize < term.dtype.itemsize:
        term = term.astype(dtype)
    size, device = term.shape[dimension] // devices, axis_index(axis_name)

    def block_of(offset: int) -> jax.Array:
        # The `%` of arrays computes with constants alone, which a loop would compute first.
        owner = lax.rem(device + offset, np.int32(devices))
        return lax.dynamic_slice_in_dim(term, owner * size, size, dimension)

    def arriving(offset: int) -> jax.Array:
        pairs = [(d, (d + offset) % devices) for d in range(devices)]
        return lax.ppermute(block_of(offset), axis_name, pairs)

    return add(block_of(0), *map(arriving, range(1, devices)), dtype=dtype)
