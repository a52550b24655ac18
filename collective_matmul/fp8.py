"""Arrays in 8-bit floating point: how they are scaled, quantized and multiplied.

Legend: M rows, K contracted, N columns. "Scale" is what a stored value is multiplied by to get the
number it stands for, in float32.

The recipes, by the part of an array that has a scale of its own:

============  =======================  ===================  =============  ================
recipe        x and dy                 w                    dy's dtype     weight gradient
============  =======================  ===================  =============  ================
tensorwise    a device's shard         the array            float8_e5m2    in 8 bits
rowwise       a row                    a column             float8_e4m3fn  in x's dtype
blockwise     128 numbers of a row     a block [128, 128]   float8_e4m3fn  in x's dtype
============  =======================  ===================  =============  ================

x and w are float8_e4m3fn. "rowwise" and "tensorwise" are those of torchao; "blockwise" is that of
DeepSeek-V3 (arXiv:2412.19437, section 3.3), but for the weight gradient.

A weight gradient in 8 bits contracts rows, also of shards that have different scales: see
`fp8_weight_gradients`.

Numbers that are not finite are not counted for a scale. They become NaN in float8_e4m3fn, so the
products that they are part of are NaN, and all others keep their precision.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from collective_matmul._compat import axis_index, on_one_device, pmax
from collective_matmul.fp8_messages import (
    message,
    message_scale_bytes,
    message_scales,
    message_values,
)

_E4M3, _E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)

#: An array, also one of the host.
Array = jax.Array | np.ndarray
RecipeName = Literal["tensorwise", "rowwise", "blockwise"]

#: Numbers of a row, and rows and columns of a weight, that have a scale in common: "blockwise".
BLOCK = 128
#: The checkpoint name of the scales of messages that have one for all rows. A backward that
#: computes a message again, to save memory, needs one pass less if it finds the scale.
SCALE_CHECKPOINT_NAME = "collective_matmul_fp8_scale"
#: The least scale. Smaller ones would be flushed to zero, by which nothing can be divided.
_LEAST_SCALE = 2.0**-126


@dataclass(frozen=True)
class Recipe:
    """How operands are scaled.

    Attributes:
      name: the name that users give.
      dtype: of x and w.
      gradient_dtype: of dy.
      weight_gradient_in_fp8: whether the weight gradient's operands are 8-bit numbers too. Else
        they have x's dtype.
    """

    name: RecipeName
    dtype: jnp.dtype = _E4M3
    gradient_dtype: jnp.dtype = _E4M3
    weight_gradient_in_fp8: bool = False

    def scales_of_row(self, columns: int) -> int:
        """The number of scales of a row of x."""
        return -(-columns // BLOCK) if self.name == "blockwise" else 1

    def scale(self, largest: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The scale of numbers of which `largest` is the largest magnitude, float32.

        It is a power of two where weight gradients have 8-bit operands: these are then multiplied
        by the ratio of two scales, exactly.
        """
        scale = _scale(largest, dtype)
        return _next_power_of_two(scale) if self.weight_gradient_in_fp8 else scale

    def message_columns(self, columns: int) -> int:
        """The size of the last dimension of x's message: one byte each."""
        return columns + message_scale_bytes(self.scales_of_row(columns))


#: The recipes by name.
RECIPES: dict[str, Recipe] = {
    "tensorwise": Recipe("tensorwise", gradient_dtype=_E5M2, weight_gradient_in_fp8=True),
    "rowwise": Recipe("rowwise"),
    "blockwise": Recipe("blockwise"),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledMatrix:
    """A weight [K, N] in 8 bits, with its scales.

    Of a weight that a mesh axis shards, it may have the values of a shard, and the scales of the
    whole; see `gathered`.

    Attributes:
      values: [N, K], contracted along the last dimension as Hopper's tensor cores want it.
      scales: float32, one of each column [N], or of each block [ceil(N / 128), ceil(K / 128)].
      operand_dtype: dtype of the values of messages that it is multiplied with.
      product_dtype: dtype of the products.
    """

    values: jax.Array
    scales: jax.Array
    operand_dtype: jnp.dtype = field(metadata={"static": True})
    product_dtype: jnp.dtype = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        columns, contracted = self.values.shape
        return contracted, columns

    @property
    def in_blocks(self) -> bool:
        """Whether blocks have the scales, not columns."""
        return self.scales.ndim == 2


def quantize_rows(xs: Sequence[Array], recipe: Recipe, dtype: Any = None) -> tuple[jax.Array, ...]:
    """The messages of arrays [..., K_i], in `dtype`, by default the recipe's.

    Arrays of a sequence are operands of one sum of products. Unless the recipe is "blockwise", they
    have their scales in common, so that products are added before they are scaled.
    """
    dtype = recipe.dtype if dtype is None else jnp.dtype(dtype)
    if recipe.name == "blockwise":
        return tuple(_quantized_blocks_of_rows(x, dtype) for x in xs)
    axes = None if recipe.name == "tensorwise" else -1
    largest = [jnp.max(_magnitude(x), axis=axes, keepdims=True) for x in xs]
    scale = recipe.scale(functools.reduce(jnp.maximum, largest), dtype)
    if axes is None:
        scale = checkpoint_name(scale, SCALE_CHECKPOINT_NAME)
    rows = [jnp.broadcast_to(scale, (*x.shape[:-1], 1)) for x in xs]
    values = [_divided(x, scale, dtype) for x in xs]
    return tuple(message(each, scales) for each, scales in zip(values, rows, strict=True))


def quantize_weights(
    ws: Sequence[Array],
    recipe: Recipe,
    operand_dtype: Any = None,
    *,
    axis_name: str | None = None,
    dimension: int = 0,
) -> tuple[ScaledMatrix, ...]:
    """Weights, each [K_i, N], by columns or blocks.

    If there are several, they are operands of one sum of products; see `quantize_rows`.

    Args:
      ws: the weights, or shards of them.
      recipe: says which numbers have a scale in common.
      operand_dtype: dtype of the messages to multiply them with; by default the recipe's.
      axis_name: a mesh axis that shards the weights, or None. Its devices agree on the scales,
        which are those that the whole weights would have.
      dimension: the dimension that it shards, 0 or 1.

    Returns:
      Of shards: their values, and the scales of the whole.
    """
    operand_dtype = recipe.dtype if operand_dtype is None else jnp.dtype(operand_dtype)
    if recipe.name == "blockwise":
        blocks = (_quantized_blocks(w.T, recipe.dtype, axis_name, 1 - dimension) for w in ws)
        return tuple(
            ScaledMatrix(values, scales, operand_dtype, w.dtype)
            for (values, scales), w in zip(blocks, ws, strict=True)
        )
    axes = (0, 1) if recipe.name == "tensorwise" else (0,)
    largest = [_largest_magnitude(w, axes) for w in ws]
    common = functools.reduce(jnp.maximum, largest)
    divides_columns = axis_name is not None and dimension == 1
    if axis_name is not None and (recipe.name == "tensorwise" or not divides_columns):
        common = pmax(common, axis_name)
    scale = recipe.scale(common, recipe.dtype)
    # One scale for the array is there already for the columns of other shards.
    repeats = lax.axis_size(axis_name) if divides_columns and recipe.name == "tensorwise" else 1
    columns = [jnp.broadcast_to(scale[0], (w.shape[1] * repeats,)) for w in ws]
    if divides_columns and repeats == 1:
        columns = [lax.all_gather(each, axis_name, tiled=True) for each in columns]
    values = [_divided(w, scale, recipe.dtype).T for w in ws]
    return tuple(
        ScaledMatrix(each, scales, operand_dtype, w.dtype)
        for each, scales, w in zip(values, columns, ws, strict=True)
    )


def gathered(shard: ScaledMatrix, axis_name: str, dimension: int) -> ScaledMatrix:
    """The whole weight [K, N] of a shard along a dimension, which `axis_name` shards."""
    values = lax.all_gather(shard.values, axis_name, axis=1 - dimension, tiled=True)
    return dataclasses.replace(shard, values=values)


def scaled_matmul(x: jax.Array, w: ScaledMatrix) -> jax.Array:
    """The product [..., N] of a message [..., K + bytes] and a weight, in `w.product_dtype`.

    Scales of rows and columns multiply the float32 sums. XLA has no matmul with scales of blocks:
    there, it multiplies in float32.
    """
    contracted, _ = w.shape
    dimensions = (((x.ndim - 1,), (1,)), ((), ()))
    if not w.in_blocks:
        values = message_values(x, contracted, w.operand_dtype)
        scales = message_scales(x, contracted, 1)
        product = lax.dot_general(values, w.values, dimensions, preferred_element_type=jnp.float32)
        scaled = scaled_sums(product, scales, _as_row(w.scales, x.ndim))
        return scaled.astype(w.product_dtype)
    # For GPUs, XLA drops a rounding to 8 bits whose result is widened in the same program.
    x, w = lax.optimization_barrier((x, w))
    return lax.dot_general(
        dequantized_rows(x, contracted, RECIPES["blockwise"], w.operand_dtype),
        dequantized(w).T,
        dimensions,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    ).astype(w.product_dtype)


def scaled_sums(sums: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """``sums * row * column``, where nothing in between overflows unless the result does.

    A scale of rows above 1 comes after that of columns, which may be small. Others come before.
    """
    return sums * jnp.minimum(row, 1.0) * column * jnp.maximum(row, 1.0)


def dequantized(w: ScaledMatrix) -> jax.Array:
    """The weight [K, N] that a scaled matrix stands for, float32."""
    contracted, columns = w.shape
    scales = w.scales[:, None]
    if w.in_blocks:
        scales = _spread(_spread(w.scales, columns, 0), contracted, 1)
    return (w.values.astype(jnp.float32) * scales).T


def dequantized_rows(x: jax.Array, columns: int, recipe: Recipe, dtype: Any) -> jax.Array:
    """The array [..., K] that a message of such values stands for, float32; K is `columns`."""
    scales = message_scales(x, columns, recipe.scales_of_row(columns))
    if recipe.name == "blockwise":
        scales = _spread(scales, columns, -1)
    return message_values(x, columns, dtype).astype(jnp.float32) * scales


def _quantized_blocks_of_rows(x: Array, dtype: jnp.dtype) -> jax.Array:
    columns = x.shape[-1]
    blocks = _in_blocks(x, -1)
    scale = _scale(jnp.max(_magnitude(blocks), axis=-1, keepdims=True), dtype)
    values = _divided(blocks, scale, dtype).reshape(*x.shape[:-1], -1)
    return message(lax.slice_in_dim(values, 0, columns, axis=-1), scale[..., 0])


def _quantized_blocks(
    w: Array, dtype: jnp.dtype, axis_name: str | None, dimension: int
) -> tuple[jax.Array, jax.Array]:
    """The values of a matrix [N, K], and the scales of its blocks of 128 × 128.

    If an axis shards a dimension, the scales are those of the whole matrix. A shard may begin and
    end inside a block: it is divided into parts that are inside of one block each.
    """
    rows, columns = (
        math.gcd(size, BLOCK) if axis_name is not None and place == dimension else BLOCK
        for place, size in enumerate(w.shape)
    )
    parts = _in_blocks(_in_blocks(w, 0, rows), 2, columns)  # [N / rows, rows, K / columns, columns]
    scale = _scale(_largest_magnitude(parts, (1, 3)), dtype)
    scales = scale[:, 0, :, 0]
    if axis_name is not None:
        own, scales = _scales_of_blocks(
            scales, BLOCK // (rows, columns)[dimension], axis_name, dimension
        )
        scale = own[:, None, :, None]
    values = _divided(parts, scale, dtype)
    values = values.reshape(math.prod(values.shape[:2]), -1)[: w.shape[0], : w.shape[1]]
    return values, scales


def _scales_of_blocks(
    scales: jax.Array, parts: int, axis_name: str, dimension: int
) -> tuple[jax.Array, jax.Array]:
    """Scales of this shard's parts, those of their blocks; and of all blocks of the whole matrix.

    Args:
      scales: what the parts would have for scales of their own, float32 [n, k].
      parts: the number of parts of a block, in the dimension that the axis shards.
      axis_name: the axis.
      dimension: the dimension.
    """
    whole = lax.all_gather(scales, axis_name, axis=dimension, tiled=True)
    blocks = jnp.max(_in_blocks(whole, dimension, parts), axis=dimension + 1)
    size = scales.shape[dimension]
    of_parts = _spread(blocks, whole.shape[dimension], dimension, parts)
    first = axis_index(axis_name) * size
    return lax.dynamic_slice_in_dim(of_parts, first, size, dimension), blocks


def _in_blocks(x: Array, dimension: int, block: int = BLOCK) -> jax.Array:
    """Divides a dimension into blocks, the last one filled up with zeros."""
    dimension %= x.ndim
    padding = [(0, 0, 0)] * x.ndim
    padding[dimension] = (0, -x.shape[dimension] % block, 0)
    # Not by jnp.pad, whose zero is an array: loops would compute it first, and beside explicit axes
    # JAX cannot keep it.
    if any(padding[dimension]):
        x = lax.pad(jnp.asarray(x), np.zeros((), x.dtype), padding)
    return jnp.asarray(x).reshape(*x.shape[:dimension], -1, block, *x.shape[dimension + 1 :])


def _spread(scales: jax.Array, size: int, dimension: int, block: int = BLOCK) -> jax.Array:
    """The scale of each of `size` numbers, from those of their blocks."""
    return lax.slice_in_dim(jnp.repeat(scales, block, dimension), 0, size, axis=dimension)


def _largest_magnitude(w: Array, axes: tuple[int, ...]) -> jax.Array:
    """The largest finite magnitudes along some axes, which have size 1 in the result, float32.

    It reads w once. The same as a maximum of magnitudes XLA divides into three kernels for GPUs
    where columns are reduced; two of them write an array of w's shape. That is what it is where the
    compiler may divide w over devices, which it cannot do to a reduction by another function.
    """
    if not on_one_device():
        return jnp.max(_magnitude(w), axes, keepdims=True, initial=0)

    def larger(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.maximum(_magnitude(x), _magnitude(y))

    largest = lax.reduce(jnp.asarray(w, jnp.float32), np.float32(0), larger, axes)
    # A reduction of one number returns it without calling `larger`.
    return lax.expand_dims(_magnitude(largest), axes)


def _magnitude(x: Array) -> jax.Array:
    """The absolute values in float32; 0 for what is not finite."""
    wide = jnp.abs(jnp.asarray(x, jnp.float32))
    # Not by jnp.where, which is jitted: up to jax 0.12, XLA crashes on a call inside of a reduction
    # that nothing uses.
    return lax.select(wide < jnp.inf, wide, jnp.zeros_like(wide))


def _scale(largest: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The scale by which the largest magnitude becomes the largest finite number of `dtype`."""
    return jnp.maximum(largest * (1.0 / float(jnp.finfo(dtype).max)), _LEAST_SCALE)


def _next_power_of_two(scale: jax.Array) -> jax.Array:
    """The least power of two that is not below a positive normal float32."""
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    mantissa = np.uint32(2**23 - 1)
    return lax.bitcast_convert_type((bits + mantissa) & ~mantissa, jnp.float32)


def _divided(x: Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    # Compilers replace some of these divisions by products. Written so, all round alike.
    return (jnp.asarray(x, jnp.float32) * (1.0 / scale)).astype(dtype)


def _as_row(scales: jax.Array, ndim: int) -> jax.Array:
    return scales.reshape((1,) * (ndim - 1) + scales.shape)
