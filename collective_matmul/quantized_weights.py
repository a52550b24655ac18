"""Weights that are quantized once, for several calls of the ops.

An op with `fp8` quantizes its weights: for its forward pass, and transposed for its backward pass,
which contracts the other dimension. Where the same weights are used again before they change, as by
the microbatches of a step, `prequantize` makes both copies before. Of weights that a second mesh
axis shards, it makes copies of the shards, and each use gathers one of the two, in 8 bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul import checks
from collective_matmul._compat import vary_over, varying_axes
from collective_matmul.fp8 import (
    RECIPES,
    Recipe,
    RecipeName,
    ScaledMatrix,
    gathered,
    quantize_weights,
)
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
      shards: how a second mesh axis shards the weight, of which array and copies are this device's
        shard, or None. The scales of the copies are those of the whole.
    """

    array: jax.Array
    forward: ScaledMatrix
    backward: ScaledMatrix
    fp8: RecipeName = field(metadata={"static": True})
    number: int = field(metadata={"static": True})
    count: int = field(metadata={"static": True})
    shards: WeightShards | None = field(default=None, metadata={"static": True})

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
        shards = self.shards and dataclasses.replace(
            self.shards, dimension=1 - self.shards.dimension
        )
        return dataclasses.replace(
            self,
            array=self.array.T,
            forward=self.backward,
            backward=self.forward,
            shards=shards,
        )

    def gathered(self, dimension: int) -> QuantizedWeight:
        """The whole of a shard, whose copies are gathered in 8 bits.

        Its array is not gathered: it is NaN, in the dtype of the products. It is there for its
        gradient, which is that of the whole weight, and is still to be scattered.

        Args:
          dimension: the dimension of the array that the axis shards.

        Raises:
          ValueError: if it is not a shard.
        """
        if self.shards is None:
            raise ValueError(
                "w: quantized as a whole; expected a shard to gather; name its axis when you call"
                " prequantize, by weight_axis_name"
            )
        axis_name, sharded = self.shards.axis_name, self.shards.dimension
        shape = list(self.shape)
        shape[dimension] *= self.shards.axis_size
        array = jnp.full(shape, jnp.nan, self.forward.product_dtype)
        return dataclasses.replace(
            self,
            array=vary_over(array, varying_axes(self.array)),
            forward=gathered(self.forward, axis_name, sharded),
            backward=gathered(self.backward, axis_name, 1 - sharded),
            shards=None,
        )


@overload
def prequantize(
    w: jax.Array,
    fp8: RecipeName,
    *,
    weight_axis_name: str | None = None,
    weight_dimension: int = 0,
) -> QuantizedWeight: ...
@overload
def prequantize(
    w: Sequence[jax.Array],
    fp8: RecipeName,
    *,
    weight_axis_name: str | None = None,
    weight_dimension: int = 0,
) -> tuple[QuantizedWeight, ...]: ...
def prequantize(w, fp8, *, weight_axis_name=None, weight_dimension=0):
    """Quantizes the weights of one call of an op, which then takes the result in place of `w`.

    Results and gradients are the same as with `w`. Weights of one call have scales in common, so
    those of `all_gather_matmul` that share a gather are quantized together::

        w = prequantize(w, "rowwise")                            once
        y = all_gather_matmul(x, w, axis_name, fp8="rowwise")    several times

    The gradient of the result's `array` is that of w. To differentiate with respect to w, call
    ``each.with_array(w)`` inside the differentiated function.

    With `weight_axis_name`, w are shards, inside a `jax.shard_map` over that axis, whose devices
    agree on the scales: those of the whole weights. Ops then take the same two arguments. They
    gather the values of a copy, which are 8 bits. Shards are quantized in the dtype of x too; give
    the result the array whose gradient you want, which may be wider::

        q = prequantize(w.astype(x.dtype), "rowwise", weight_axis_name="fsdp").with_array(w)

    Args:
      w: [K, *N] as the op takes it, in the dtype of x, or a sequence of such; or their shards.
      fp8: the recipe, as the op takes it.
      weight_axis_name: a mesh axis that shards the weights, as the op takes it; None: they are
        whole.
      weight_dimension: the dimension of every w that it shards, 0 or 1.

    Returns:
      A `QuantizedWeight`, or a tuple of them.

    Raises:
      ValueError, TypeError: for arguments that do not fit.
      NameError: if no enclosing `shard_map` has such an axis.
    """
    ws = tuple(w) if isinstance(w, Sequence) else (w,)
    if fp8 is None:
        raise ValueError(f"fp8=None: expected a recipe: {', '.join(map(repr, RECIPES))}")
    checks.fp8(fp8)
    checks.weights(ws)
    checks.quantizable("w", ws[0], fp8)
    recipe = RECIPES[fp8]
    shards = checks.weight_shards(weight_axis_name, weight_dimension)
    matrices = [lax.stop_gradient(w).reshape(w.shape[0], math.prod(w.shape[1:])) for w in ws]
    forward = [copies_of([matrix], recipe, shards)[0] for matrix in matrices]
    backward = copies_of(matrices, recipe, shards, transposed=True)
    quantized = tuple(
        QuantizedWeight(*each, fp8=fp8, number=number, count=len(ws), shards=shards)
        for number, each in enumerate(zip(ws, forward, backward, strict=True))
    )
    return quantized if isinstance(w, Sequence) else quantized[0]


def copies_of(
    ws: Sequence[jax.Array],
    recipe: Recipe,
    shards: WeightShards | None,
    *,
    transposed: bool = False,
) -> tuple[ScaledMatrix, ...]:
    """Weights [K, N] or their shards, quantized for the forward, or `transposed` for the backward.

    If there are several, they are operands of one sum of products, as for `quantize_weights`.
    """
    oriented = [w.T for w in ws] if transposed else ws
    dtype = recipe.gradient_dtype if transposed else recipe.dtype
    if shards is None:
        return quantize_weights(oriented, recipe, dtype)
    dimension = sharded_dimension(shards, transposed)
    return quantize_weights(
        oriented, recipe, dtype, axis_name=shards.axis_name, dimension=dimension
    )


def sharded_dimension(shards: WeightShards, transposed: bool) -> int:
    """The dimension of a copy, or of a transposed copy, that is sharded."""
    return 1 - shards.dimension if transposed else shards.dimension


def unwrapped(
    ws: Sequence[jax.Array | QuantizedWeight],
    fp8: RecipeName | None,
    shards: WeightShards | None,
    x: Any,
) -> tuple[tuple[jax.Array, ...], Copies | None]:
    """The arrays of an op's weights, and their copies if they are quantized already.

    Args:
      ws: the weights of one call.
      fp8: its recipe.
      shards: how a second axis shards its weights.
      x: its other operand, whose dtype copies of shards have been quantized in.

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
    for w in quantized:
        if w.shards != shards:
            raise ValueError(
                f"w: quantized as {_described(w.shards)}, and the op has {_described(shards)};"
                " expected the same; pass weight_axis_name and weight_dimension to both,"
                " prequantize and the op, or to neither"
            )
        if w.fp8 != fp8:
            raise ValueError(
                f"fp8={fp8!r}: w is quantized by {w.fp8!r}; expected the same recipe; pass"
                f" fp8={w.fp8!r}"
            )
        copied, shape = w.forward, (w.shape[0], math.prod(w.shape[1:]))
        own_dtype = w.dtype if shards is None else getattr(x, "dtype", None)  # Arrays may be wider.
        if (copied.shape, copied.product_dtype) != (shape, own_dtype):
            raise ValueError(
                f"w: {own_dtype} {w.shape}, and its copies are of {copied.product_dtype}"
                f" {copied.shape}; expected copies of this array; call prequantize for it"
            )
    arrays = tuple(_unread(w.array) for w in quantized)
    return arrays, tuple((w.forward, w.backward) for w in quantized)


@jax.custom_vjp
def _unread(array: jax.Array) -> jax.Array:
    """An array of the same type that is NaN, with the gradient of the array.

    So nothing reads the array of a `QuantizedWeight`. What is rematerialized would: a barrier at
    its begin takes all operands of the ops inside, and XLA keeps them in a loop over microbatches.
    """
    return _nan_like(array)


def _nan_like(array: jax.Array) -> jax.Array:
    nan = jnp.full_like(array, jnp.nan)
    return vary_over(nan, varying_axes(array))


_unread.defvjp(lambda array: (_nan_like(array), None), lambda _, gradient: (gradient,))


def _described(shards: WeightShards | None) -> str:
    return "whole weights" if shards is None else f"shards, {shards}"


def array_of(w: jax.Array | QuantizedWeight) -> jax.Array:
    """The weight as an array."""
    return w.array if isinstance(w, QuantizedWeight) else w
