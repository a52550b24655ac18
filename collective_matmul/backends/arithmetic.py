"""Local arithmetic that all backends share."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul.equation import Equation
from collective_matmul.fp8 import ScaledMatrix, scaled_matmul
from collective_matmul.mosaic_gpu import scaled_chunks

#: A weight as the backends take it: an array, or in 8 bits, to be multiplied with messages.
Weight = jax.Array | ScaledMatrix


def matmul(x: jax.Array, w: Weight, transpose_w: bool = False) -> jax.Array:
    """Multiplies x [..., K] by w [K, N] -> [..., N], in x's dtype, accumulated in float32.

    With `transpose_w`, w is [N, K]. XLA accumulates half-precision matmuls in float32 on CPUs and
    GPUs and rounds once. Or x is a message and w a scaled matrix, which is never transposed.
    """
    if isinstance(w, ScaledMatrix):
        product = scaled_chunks.multiply(x, w)
        return scaled_matmul(x, w) if product is None else product
    return lax.dot_general(x, w, (((x.ndim - 1,), (1 if transpose_w else 0,)), ((), ())))


def product_dtype(x: jax.Array, w: Weight) -> jnp.dtype:
    """The dtype of the product of x and w."""
    return w.product_dtype if isinstance(w, ScaledMatrix) else x.dtype


def add(*terms: jax.Array, dtype: Any = None) -> jax.Array:
    """The sum in `dtype`, by default the terms', rounded once: additions are in float32."""
    dtype = dtype or terms[0].dtype
    if len(terms) == 1:
        return terms[0].astype(dtype)
    wide = accumulator(terms[0].dtype)
    return functools.reduce(jnp.add, (term.astype(wide) for term in terms)).astype(dtype)


def accumulator(dtype: Any) -> jnp.dtype:
    """The dtype in which terms of this floating dtype are added up: at least float32.

    `jnp.promote_types` raises under ``jax_numpy_dtype_promotion="strict"``.
    """
    return jnp.dtype(dtype if jnp.finfo(dtype).bits > 32 else jnp.float32)


def contract_rows(x: jax.Array, y: jax.Array) -> jax.Array:
    """The weight gradient: x [..., K] and y [..., N] -> [K, N], contracted over all rows."""
    rows = tuple(range(x.ndim - 1))
    return lax.dot_general(x, y, ((rows, rows), ((), ())))


def einsum(equation: Equation, a: jax.Array, b: jax.Array, dtype: Any = None) -> jax.Array:
    """The einsum of a and b, accumulated in float32; in `dtype`, or else that of the operands."""
    return jnp.einsum(str(equation), a, b, preferred_element_type=dtype)
