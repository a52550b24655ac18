"""The local arithmetic that every implementation shares."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies x [..., K] by w [K, N] -> [..., N], in x's dtype, accumulated in float32.

    XLA accumulates half-precision matmuls in float32 on CPUs and GPUs and rounds once.
    """
    return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))


def add(*terms: jax.Array) -> jax.Array:
    """The sum in the terms' dtype, rounded once: the additions themselves are in float32."""
    if len(terms) == 1:
        return terms[0]
    dtype = terms[0].dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    return functools.reduce(jnp.add, (term.astype(wide) for term in terms)).astype(dtype)


def matmul_sum(xs: Sequence[jax.Array], ws: Sequence[jax.Array]) -> jax.Array:
    """The sum of the matmuls of corresponding pairs."""
    return add(*(matmul(x, w) for x, w in zip(xs, ws, strict=True)))
