"""Messages: an array in 8 bits and its scales, which one transfer moves together.

A *message* is an array of bytes, the quantized numbers and their scales, so that one transfer moves
both::

    uint8 [..., M, K + bytes of scales]    the row's K values, and then the bytes of its scales

So a message can be divided into chunks along every dimension but the last, and gathered like any
other array. It is an array of bytes because compilers may replace one NaN by another, and bytes of
a scale can look like one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

#: The scales of a row take a multiple of this: so rows are whole tiles, as our kernels read them.
_ALIGNMENT = 128


def message(values: jax.Array, scales: jax.Array) -> jax.Array:
    """The message of values [..., K] and scales [..., S], float32.

    If a row has one scale, copies fill the bytes behind it; else zeros do.
    """
    own, filled = scales.shape[-1], message_scale_bytes(scales.shape[-1]) // scales.itemsize
    if own == 1:
        # Unlike padding, XLA writes copies in the kernel that computes the values.
        scales = jnp.broadcast_to(scales, (*scales.shape[:-1], filled))
    else:
        # Not by jnp.pad: see `collective_matmul.fp8`.
        widths = [*[(0, 0, 0)] * (scales.ndim - 1), (0, filled - own, 0)]
        scales = lax.pad(scales, np.zeros((), scales.dtype), widths)
    raw = lax.bitcast_convert_type(scales, jnp.uint8).reshape(*scales.shape[:-1], -1)
    values = lax.bitcast_convert_type(values, jnp.uint8)
    return lax.concatenate([values, raw], values.ndim - 1)


def message_scale_bytes(scales: int) -> int:
    """The bytes at the end of each row of a message that has this number of scales in a row."""
    return -(-4 * scales // _ALIGNMENT) * _ALIGNMENT


def message_values(message: jax.Array, columns: int, dtype: jnp.dtype) -> jax.Array:
    """The values [..., K] of a message, which have this dtype; K is `columns`."""
    return lax.bitcast_convert_type(lax.slice_in_dim(message, 0, columns, axis=-1), dtype)


def message_scales(message: jax.Array, columns: int, scales: int) -> jax.Array:
    """The scales [..., S] of a message, float32; S is `scales`, K is `columns`."""
    raw = lax.slice_in_dim(message, columns, columns + 4 * scales, axis=-1)
    return lax.bitcast_convert_type(raw.reshape(*raw.shape[:-1], scales, 4), jnp.float32)


def value_columns(message: jax.Array) -> int:
    """The number of values in a row of a message whose rows have one scale: K."""
    return message.shape[-1] - message_scale_bytes(1)
