"""How arrays are scaled and rounded to 8 bits.

"Scale" is what a stored value is multiplied by to get the number it stands for, in float32. Numbers
that are not finite are not counted for a scale. They become NaN in float8_e4m3fn, so the products
that they are part of are NaN, and all others keep their precision.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collective_matmul._compat import on_one_device
from collective_matmul.mosaic_gpu.hopper_matmul.scaled_kernel import BLOCK

#: An array, also one of the host.
Array = jax.Array | np.ndarray

#: The least scale. Smaller ones would be flushed to zero, by which nothing can be divided.
_LEAST_SCALE = 2.0**-126


def divided_into_blocks(x: Array, dimension: int, block: int = BLOCK) -> jax.Array:
    """Divides a dimension into blocks, the last one filled up with zeros."""
    dimension %= x.ndim
    padding = [(0, 0, 0)] * x.ndim
    padding[dimension] = (0, -x.shape[dimension] % block, 0)
    # Not by jnp.pad, whose zero is an array: loops would compute it first, and beside explicit axes
    # JAX cannot keep it.
    if any(padding[dimension]):
        x = lax.pad(jnp.asarray(x), np.zeros((), x.dtype), padding)
    return jnp.asarray(x).reshape(*x.shape[:dimension], -1, block, *x.shape[dimension + 1 :])


def spread(scales: jax.Array, size: int, dimension: int, block: int = BLOCK) -> jax.Array:
    """The scale of each of `size` numbers, from those of their blocks."""
    return lax.slice_in_dim(jnp.repeat(scales, block, dimension), 0, size, axis=dimension)


def largest_magnitude(w: Array, axes: tuple[int, ...]) -> jax.Array:
    """The largest finite magnitudes along some axes, which have size 1 in the result, float32.

    It reads w once. The same as a maximum of magnitudes XLA divides into three kernels for GPUs
    where columns are reduced; two of them write an array of w's shape. That is what it is where the
    compiler may divide w over devices, which it cannot do to a reduction by another function.
    """
    if not on_one_device():
        return jnp.max(magnitude(w), axes, keepdims=True, initial=0)

    def larger(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.maximum(magnitude(x), magnitude(y))

    largest = lax.reduce(jnp.asarray(w, jnp.float32), np.float32(0), larger, axes)
    # A reduction of one number returns it without calling `larger`.
    return lax.expand_dims(magnitude(largest), axes)


def magnitude(x: Array) -> jax.Array:
    """The absolute values in float32; 0 for what is not finite."""
    wide = jnp.abs(jnp.asarray(x, jnp.float32))
    # Not by jnp.where, which is jitted: up to jax 0.12, XLA crashes on a call inside of a reduction
    # that nothing uses.
    return lax.select(wide < jnp.inf, wide, jnp.zeros_like(wide))


def scale_of(largest: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The scale by which the largest magnitude becomes the largest finite number of `dtype`."""
    return jnp.maximum(largest * (1.0 / float(jnp.finfo(dtype).max)), _LEAST_SCALE)


def next_power_of_two(scale: jax.Array) -> jax.Array:
    """The least power of two that is not below a positive normal float32."""
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    mantissa = np.uint32(2**23 - 1)
    return lax.bitcast_convert_type((bits + mantissa) & ~mantissa, jnp.float32)


def rounded(x: Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The numbers divided by their scale, in `dtype`."""
    # Compilers replace some of these divisions by products. Written so, all round alike.
    return (jnp.asarray(x, jnp.float32) * (1.0 / scale)).astype(dtype)


def as_row(scales: jax.Array, ndim: int) -> jax.Array:
    """Scales of columns, with leading dimensions of size 1."""
    return scales.reshape((1,) * (ndim - 1) + scales.shape)
