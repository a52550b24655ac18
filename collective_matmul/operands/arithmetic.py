"""Sums and products of arrays, accumulated in float32."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


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


def einsum(equation: object, a: jax.Array, b: jax.Array, dtype: Any = None) -> jax.Array:
    """The einsum of a and b, accumulated in float32; in `dtype`, or else that of the operands.

    `str(equation)` are its subscripts.
    """
    return jnp.einsum(str(equation), a, b, preferred_element_type=dtype)
