"""Sums of arrays over a mesh axis, scattered by copies between peers.

A reduce-scatter of XLA sends what it adds, in the dtype of the sum, and its kernels take
multiprocessors from matmuls. Here each term travels in its own dtype, straight to its owner, by the
copies that rings consist of.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from collective_matmul._compat import axis_index
from collective_matmul.backends.arithmetic import add
from collective_matmul.peer_access import no_peer_copies_reason
from collective_matmul.site import WeightShards


def scatters_directly(
    sharding: WeightShards, requested: Sequence[str] | None, divergent_axes: Sequence[str]
) -> bool:
    """Whether terms are to be copied between peers: where a ring over the axis would be.

    Args:
      sharding: the axis.
      requested: the `implementation` of the op.
      divergent_axes: see `Site`.
    """
    allowed = requested is None or any(name.startswith("ring") for name in requested)
    return allowed and not divergent_axes and no_peer_copies_reason(sharding.axis_name) is None


def scattered_sum(
    term: jax.Array, sharding: WeightShards, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """This device's shard of the sum of all terms, in `dtype`, rounded once.

    Args:
      term: this device's, whole along the dimension that is sharded.
      sharding: the axis to sum over, and the dimension to scatter.
      dtype: of the result. Terms travel in it if it is narrower than theirs.
    """
    dtype, dimension, devices = np.dtype(dtype), sharding.dimension, sharding.axis_size
    if dtype.itemsize < term.dtype.itemsize:
        term = term.astype(dtype)
    size, device = term.shape[dimension] // devices, axis_index(sharding.axis_name)

    def block_of(offset: int) -> jax.Array:
        # The `%` of arrays computes with constants alone, which a loop would compute first.
        owner = lax.rem(device + offset, np.int32(devices))
        return lax.dynamic_slice_in_dim(term, owner * size, size, dimension)

    def arriving(offset: int) -> jax.Array:
        pairs = [(d, (d + offset) % devices) for d in range(devices)]
        return lax.ppermute(block_of(offset), sharding.axis_name, pairs)

    return add(block_of(0), *map(arriving, range(1, devices)), dtype=dtype)
