"""Results that programs compute from an array that a ring gathered, whole or in chunks.

Differentiable, for programs that contain gradients and are differentiated again. Call these inside
`jax.shard_map`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray

from collective_matmul.explicit_axes import columns_spec, specs_like, with_auto_axes
from collective_matmul.operands.arithmetic import contract_rows
from collective_matmul.operands.chunked import Chunked, Gathered, whole_of
from collective_matmul.operands.multiply import contract as contract_rows_of
from collective_matmul.ops.matmul.reverse_mode import ReverseMode


def whole_array(gathered: Gathered, dimension: int, like: ShapedArray) -> jax.Array:
    """The gathered array, joined if it is in chunks, and reshaped.

    Args:
      gathered: what the ring kept.
      dimension: the gathered dimension of `gathered`.
      like: the type of the result.
    """
    if jax.sharding.get_abstract_mesh().explicit_axes:
        return _whole_array(gathered, dimension, like)
    # Derived by JAX itself: a cotangent that is known to be zero remains known to be.
    return lax.reshape(whole_of(gathered, dimension), like.shape)


@functools.partial(ReverseMode, nondiff_argnums=(1, 2))
def _whole_array(gathered: Any, dimension: int, like: ShapedArray) -> jax.Array:
    """`whole_array` where mesh axes are explicit."""

    def whole(gathered):
        return lax.reshape(whole_of(gathered, dimension), like.shape)

    return with_auto_axes(whole, lambda: specs_like(like), gathered)


def _whole_array_forward(gathered, dimension: int, like: ShapedArray):
    return _whole_array(gathered, dimension, like), gathered


def _whole_array_backward(dimension: int, like: ShapedArray, gathered, cotangent):
    def gradient(gathered, cotangent):
        def whole(gathered):
            return lax.reshape(whole_of(gathered, dimension), like.shape)

        return jax.vjp(whole, gathered)[1](cotangent)

    return with_auto_axes(gradient, lambda: (specs_like(gathered),), gathered, cotangent)


_whole_array.defvjp(_whole_array_forward, _whole_array_backward)


@functools.partial(ReverseMode, nondiff_argnums=(2,))
def weight_gradients(x: Any, ys: tuple[Any, ...], dimension: int | None) -> tuple[jax.Array, ...]:
    """``xᵀ y`` [K, N] for each y, in one launch; x or the only y may be in chunks."""
    products = functools.partial(contract_rows_of, dimension=dimension)

    def specs():
        return tuple(columns_spec(*map(_any_chunk, (x, y))) for y in ys)

    return with_auto_axes(products, specs, x, ys)


def _weight_gradients_forward(x, ys, dimension: int | None):
    return weight_gradients(x, ys, dimension), (x, ys)


def _weight_gradients_backward(dimension: int | None, operands, dws):
    def contract(x, ys):
        x, *ys = (whole_of(array, dimension) for array in (x, *ys))
        return tuple(contract_rows(x, y) for y in ys)

    def gradients(operands, dws):
        return jax.vjp(contract, *operands)[1](dws)

    return with_auto_axes(gradients, lambda: specs_like(operands), operands, dws)


weight_gradients.defvjp(_weight_gradients_forward, _weight_gradients_backward)


def _any_chunk(array: jax.Array | Chunked) -> jax.Array:
    return array.chunks[0] if isinstance(array, Chunked) else array
