"""`Recipe`: the formats of 8-bit floating point with float32 scales.

By the part of an array that has a scale of its own:

============  =======================  ===================  =============  ================
recipe        x and dy                 w                    dy's dtype     weight gradient
============  =======================  ===================  =============  ================
tensorwise    a device's shard         the array            float8_e5m2    in 8 bits
rowwise       a row                    a column             float8_e4m3fn  in x's dtype
blockwise     128 numbers of a row     a block [128, 128]   float8_e4m3fn  in x's dtype
============  =======================  ===================  =============  ================

x and w are float8_e4m3fn. "rowwise" and "tensorwise" are those of torchao; "blockwise" is that of
DeepSeek-V3 (arXiv:2412.19437, section 3.3), but for the weight gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul._compat import pmax
from collective_matmul.operands.format import Format, Shapes
from collective_matmul.operands.scaled import scaled_chunks
from collective_matmul.operands.scaled.packed_rows import (
    PackedRows,
    pack,
    scale_bytes,
    scales_of_row,
)
from collective_matmul.operands.scaled.scaled_matrix import ScaledMatrix, transposed_values
from collective_matmul.operands.scaled.scaled_rows import ScaledRows
from collective_matmul.operands.scaled.scaling import (
    Array,
    largest_magnitude,
    magnitude,
    rounded,
    scale_of,
)

#: The checkpoint name of the scales of rows that all have the same one. A backward that packs rows
#: again, to save memory, needs one pass less if it finds the scale.
SCALE_CHECKPOINT_NAME = "collective_matmul_fp8_scale"

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


@dataclass(frozen=True)
class Recipe(Format):
    """A format in which a row of x and a column of w have a scale each; subclasses have others.

    Attributes:
      name: the name that users give.
      dtype: of x and w.
      gradient_dtype: of dy.
    """

    name: str
    dtype: jnp.dtype = E4M3
    gradient_dtype: jnp.dtype = E4M3

    family = "fp8"
    scaled_parts = "rows"
    # Of our kernel on an H200.
    relative_seconds = 0.56
    # On 2 H100, stacks of layers gained 0.4 to 1.05 of what was predicted, and none lost.
    ring_error = 0.03

    @property
    def block(self) -> int | None:
        """How many numbers of a row have a scale in common; None: all."""
        return None

    def rows(self, xs: Sequence[Array], *, of_gradient: bool = False) -> tuple[PackedRows, ...]:
        """Packed rows of arrays [..., K_i]. Their scales are those of all arrays together.

        So products are added before they are scaled.
        """
        dtype = self.gradient_dtype if of_gradient else self.dtype
        largest = [self.largest_of_rows(x) for x in xs]
        scale = self.row_scale(functools.reduce(jnp.maximum, largest), dtype)
        scales = [jnp.broadcast_to(scale, (*x.shape[:-1], 1)) for x in xs]
        values = [rounded(x, scale, dtype) for x in xs]
        return tuple(map(self.packed, values, scales, xs))

    def local_rows(
        self, xs: Sequence[Array], *, of_gradient: bool = False
    ) -> tuple[ScaledRows, ...] | None:
        """Rows [M, K_i] of which each has a scale, that of all arrays together."""
        dtype = self.gradient_dtype if of_gradient else self.dtype
        largest = [jnp.max(magnitude(x), axis=-1, keepdims=True) for x in xs]
        scale = self.scale(functools.reduce(jnp.maximum, largest), dtype)
        return tuple(ScaledRows(rounded(x, scale, dtype), scale, self.block) for x in xs)

    def packed(self, values: jax.Array, scales: jax.Array, x: Array) -> PackedRows:
        """The rows of x, of which these are the values and scales."""
        return pack(values, scales, block=self.block, array=None if self.packs_gradients else x)

    def largest_of_rows(self, x: Array) -> jax.Array:
        """The largest magnitudes that decide about the scales of rows, [..., 1]."""
        return jnp.max(magnitude(x), axis=-1, keepdims=True)

    def row_scale(self, largest: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The scale of rows, float32."""
        return self.scale(largest, dtype)

    def scale(self, largest: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The scale of numbers of which `largest` is the largest magnitude, float32."""
        return scale_of(largest, dtype)

    def matrices(
        self, ws: Sequence[Array], *, transposed: bool = False, sharding: Any = None
    ) -> tuple[ScaledMatrix, ...]:
        """Scaled matrices of weights, whose scales are those of all weights together.

        Of shards they have the values; the scales are those of the whole weights.
        """
        return self._oriented(ws, None, transposed, sharding)

    def magnitudes(self, w: Array) -> Any:
        """The largest of each column [1, N], and of each row [K, 1]."""
        return largest_magnitude(w, (0,)), largest_magnitude(w, (1,))

    def matrices_with_magnitudes(
        self,
        ws: Sequence[Array],
        magnitudes: Sequence[Any],
        *,
        transposed: bool = False,
        sharding: Any = None,
    ) -> tuple[ScaledMatrix, ...]:
        """Scaled matrices of weights; see `Format`."""
        largest = [self.largest_of_columns(each, transposed) for each in magnitudes]
        return self._oriented(ws, largest, transposed, sharding)

    def largest_of_columns(self, magnitudes: Any, transposed: bool) -> jax.Array:
        """The part of `magnitudes` that `scaled` needs of a weight [K, N], or of its transpose."""
        columns, rows = magnitudes
        return rows.T if transposed else columns

    def _oriented(
        self,
        ws: Sequence[Array],
        largest: Sequence[jax.Array] | None,
        transposed: bool,
        sharding: Any,
    ) -> tuple[ScaledMatrix, ...]:
        oriented = [w.T for w in ws] if transposed else ws
        if sharding is None:
            return self.scaled(oriented, None, 0, largest)
        sharding = sharding.transposed if transposed else sharding
        return self.scaled(oriented, sharding.axis_name, sharding.dimension, largest)

    def scaled(
        self,
        ws: Sequence[Array],
        axis_name: str | None,
        dimension: int,
        largest: Sequence[jax.Array] | None = None,
    ) -> tuple[ScaledMatrix, ...]:
        """Scaled matrices of weights; an axis may shard them along a dimension.

        Args:
          ws: the weights [K_i, N], or their shards.
          axis_name: the axis; None if they are whole.
          dimension: the dimension.
          largest: `largest_of_columns` of each; None: they are found here.
        """
        largest = largest or [largest_magnitude(w, (0,)) for w in ws]
        common = functools.reduce(jnp.maximum, largest)
        if axis_name is not None and dimension == 0:
            common = pmax(common, axis_name)
        scale = self.scale(common, self.dtype)
        columns = [jnp.broadcast_to(scale[0], (w.shape[1],)) for w in ws]
        if axis_name is not None and dimension == 1:
            columns = [lax.all_gather(each, axis_name, tiled=True) for each in columns]
        return self.divided(ws, scale, columns)

    def divided(
        self, ws: Sequence[Array], scale: jax.Array, columns: Sequence[jax.Array]
    ) -> tuple[ScaledMatrix, ...]:
        """The matrices of weights that `scale` divides; `columns` are the scales of whole ones."""
        values = [rounded(w, scale, self.dtype).T for w in ws]
        return tuple(
            ScaledMatrix(each, scales, w.dtype)
            for each, scales, w in zip(values, columns, ws, strict=True)
        )

    def transposed(self, matrix: ScaledMatrix) -> tuple[ScaledMatrix, jax.Array | None]:
        """The transpose. Scales of columns become factors of rows, and its own are 1."""
        ones = jnp.ones_like(matrix.scales, shape=(matrix.shape[0],))
        values = transposed_values(matrix.values)
        return ScaledMatrix(values, ones, matrix.product_dtype), matrix.scales

    def row_bytes(self, columns: int, itemsize: int) -> int:
        """One byte for each number, and the bytes of scales."""
        del itemsize
        return columns + scale_bytes(scales_of_row(columns, self.block))

    def operand_dtypes(self, dtype: Any, *, backward: bool) -> tuple[str, str]:
        """The dtypes of 8 bits."""
        del dtype
        return (self.gradient_dtype if backward else self.dtype).name, self.dtype.name

    def fits_kernel(self, shapes: Shapes, rows: int, *, backward: bool) -> bool:
        """Whether our kernel for 8 bits multiplies this number of rows."""
        planes = math.prod(shapes.operands[0][0][: shapes.dimension or 0])
        ks, ns = zip(*(w for _, w in shapes.operands), strict=True)
        in_blocks = self.scaled_parts == "blocks"
        problem = scaled_chunks.ScaledProblem(planes, rows // planes, ks, ns, in_blocks)
        dtypes = self.operand_dtypes(None, backward=backward)
        return self.scaled_parts is not None and scaled_chunks.fits(problem, *dtypes)
