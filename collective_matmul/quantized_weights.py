"""Weights that are quantized once, for several calls of the ops.

An op with `fp8` quantizes its weights: for its forward pass, and transposed for its backward pass,
which contracts the other dimension. Where the same weights are used again before they change, as by
the microbatches of a step, `prequantize` makes both copies before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import jax

from collective_matmul import checks
from collective_matmul.fp8 import RECIPES, RecipeName, ScaledMatrix, quantize_weights
from collective_matmul.site import WeightShards

#: Of each weight, what its forward and what its backward multiplies with.
Copies = tuple[tuple[ScaledMatrix, ScaledMatrix], ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [K, *N] and its copies in 8 bits, which ops with `fp8` take in place of the array.

    They multiply with the copies. The values of the array are not read: it stands for its shape and
    dtype, and it is what the gradient belongs to. `prequantize` makes it; after each change of the
    array it must be made anew.

    Attributes:
      array: [K, *N].
      forward: the copy [K, N], for ``x w``.
      backward: the copy [N, K] of the transpose, for ``dy wᵀ``.
      fp8: the recipe.
      number: which it is of the weights that were quantized together.
      count: how many these are.
    """

    array: jax.Array
    forward: ScaledMatrix
    backward: ScaledMatrix
    fp8: RecipeName = field(metadata={"static": True})
    number: int = field(metadata={"static": True})
    count: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """[K, *N]."""
        return self.array.shape

    @property
    def dtype(self) -> Any:
        """The array's dtype, which is that of its gradient."""
        return self.array.dtype

    def with_array(self, array: jax.Array) -> QuantizedWeight:
        """The same copies for another array of these values."""
        return dataclasses.replace(self, array=array)

    def reshape(self, *shape: int) -> QuantizedWeight:
        """The array in another shape. The copies stay the matrices that they are."""
        return self.with_array(self.array.reshape(*shape))

    def astype(self, dtype: Any) -> QuantizedWeight:
        """The array in another dtype. An op takes the one that was quantized."""
        return self.with_array(self.array.astype(dtype))

    @property
    def T(self) -> QuantizedWeight:
        """The transpose of a matrix, whose forward is the backward of this.

        Raises:
          ValueError: if it was quantized together with others, which have no transpose in common.
        """
        if self.count > 1:
            raise ValueError(
                f"w: quantized together with {self.count - 1} others; expected one alone to"
                " transpose; call prequantize for it"
            )
        return dataclasses.replace(
            self, array=self.array.T, forward=self.backward, backward=self.forward
        )


@overload
def prequantize(w: jax.Array, fp8: RecipeName) -> QuantizedWeight: ...
@overload
def prequantize(w: Sequence[jax.Array], fp8: RecipeName) -> tuple[QuantizedWeight, ...]: ...
def prequantize(w, fp8):
    """Quantizes the weights of one call of an op, which then takes the result in place of `w`.

    Results and gradients are the same as with `w`. Weights of one call have scales in common, so
    those of `all_gather_matmul` that share a gather are quantized together::

        w = prequantize(w, "rowwise")                            once
        y = all_gather_matmul(x, w, axis_name, fp8="rowwise")    several times

    The gradient of the result's `array` is that of w. To differentiate with respect to w, call
    ``each.with_array(w)`` inside the differentiated function.

    Args:
      w: [K, *N] as the op takes it, in the dtype of x, or a sequence of such.
      fp8: the recipe, as the op takes it.

    Returns:
      A `QuantizedWeight`, or a tuple of them.

    Raises:
      ValueError, TypeError: for arguments that do not fit.
    """
    ws = tuple(w) if isinstance(w, Sequence) else (w,)
    if fp8 is None:
        raise ValueError(f"fp8=None: expected a recipe: {', '.join(map(repr, RECIPES))}")
    checks.fp8(fp8)
    checks.weights(ws)
    recipe = RECIPES[fp8]
    matrices = [w.reshape(w.shape[0], math.prod(w.shape[1:])) for w in ws]
    forward = [quantize_weights([matrix], recipe)[0] for matrix in matrices]
    backward = quantize_weights([m.T for m in matrices], recipe, recipe.gradient_dtype)
    quantized = tuple(
        QuantizedWeight(*each, fp8=fp8, number=number, count=len(ws))
        for number, each in enumerate(zip(ws, forward, backward, strict=True))
    )
    return quantized if isinstance(w, Sequence) else quantized[0]


def unwrapped(
    ws: Sequence[jax.Array | QuantizedWeight], fp8: RecipeName | None, shards: WeightShards | None
) -> tuple[tuple[jax.Array, ...], Copies | None]:
    """The arrays of an op's weights, and their copies if they are quantized already.

    Args:
      ws: the weights of one call.
      fp8: its recipe.
      shards: how a second axis shards its weights.

    Raises:
      ValueError: if weights were quantized otherwise than the op needs them.
    """
    quantized = [w for w in ws if isinstance(w, QuantizedWeight)]
    if not quantized:
        return tuple(map(array_of, ws)), None
    numbers = [(w.number, w.count) for w in quantized]
    if len(quantized) < len(ws) or numbers != [(i, len(ws)) for i in range(len(ws))]:
        raise ValueError(
            f"w: {len(quantized)} of {len(ws)} weights are quantized, as numbers"
            f" {', '.join(f'{i} of {count}' for i, count in numbers)} of a call of prequantize;"
            " expected all weights of one such call in their order, as they have scales in common;"
            " quantize the weights of this op together"
        )
    if shards is not None:
        raise ValueError(
            f"w: quantized before, and weight_axis_name={shards.axis_name!r}: expected arrays, as"
            " the op quantizes shards itself; pass the arrays"
        )
    for w in quantized:
        if w.fp8 != fp8:
            raise ValueError(
                f"fp8={fp8!r}: w is quantized by {w.fp8!r}; expected the same recipe; pass"
                f" fp8={w.fp8!r}"
            )
        copied, shape = w.forward, (w.shape[0], math.prod(w.shape[1:]))
        if (copied.shape, copied.product_dtype) != (shape, w.dtype):
            raise ValueError(
                f"w: {w.dtype} {w.shape}, and its copies are of {copied.product_dtype}"
                f" {copied.shape}; expected copies of this array; call prequantize for it"
            )
    return tuple(w.array for w in quantized), tuple((w.forward, w.backward) for w in quantized)


def array_of(w: jax.Array | QuantizedWeight) -> jax.Array:
    """The weight as an array."""
    return w.array if isinstance(w, QuantizedWeight) else w
