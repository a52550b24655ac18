"""The root-mean-square norm."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.parameters.use import as_varying


class RMSNorm(nnx.Module):
    """Root-mean-square norm: Zhang and Sennrich, 2019. Computes in float32, returns x's dtype."""

    def __init__(self, features: int, *, epsilon: float):
        self.scale = nnx.Param(jnp.ones(features, jnp.float32))
        self.epsilon = epsilon

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., features] -> the same shape."""
        return _normalize(x, self.scale[...], self.epsilon)

    def beside(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x and its norm, for code that uses both.

        In the backward, the gradient of the scale is complete when that of x is. XLA would else
        postpone it until the end, and keep what it sums, which is two arrays of x's size.
        """
        varying = jax.typeof(x).manual_axis_type.varying
        if not varying:  # Of global arrays, the gradient of the scale is a sum over devices.
            return x, self(x)
        # What is tied is the sum of this device's rows. Devices add theirs later, of all norms.
        x, scale = _gradients_tied(x, as_varying(self.scale[...], varying))
        with jax.named_scope("norm"):
            return x, _normalize(x, scale, self.epsilon)


@jax.custom_vjp
def _gradients_tied(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Normalizes, with gradients that wait for each other."""
    return x, scale


_gradients_tied.defvjp(
    lambda x, scale: ((x, scale), None), lambda _, gradients: lax.optimization_barrier(gradients)
)


#: Rows of a group of `_sum_of_rows`: there are enough groups for all multiprocessors.
_GROUP = 64


def _normalize(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    # JAX sums the gradient of the scale over the axes over which x varies and the scale does not.
    return _normalized(x, as_varying(scale, jax.typeof(x).manual_axis_type.varying), epsilon)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _normalized(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    return _forward(x, scale, epsilon)[0]


def _forward(x: jax.Array, scale: jax.Array, epsilon: float) -> tuple[jax.Array, tuple]:
    """The norm, and what the backward keeps: the operands and a float32 number per row."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    inverse_rms = lax.rsqrt(mean_square + epsilon)
    y = (wide * inverse_rms * _as_row(scale, x)).astype(x.dtype)
    return y, (x, scale, inverse_rms)


def _backward(epsilon: float, kept: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """With r the inverse root mean square of a row, and g = dy · scale::

        dx = r (g - x r² mean(x g))        d_scale = sum over rows of dy x r

    Means are over features.
    """
    del epsilon
    x, scale, r = kept
    wide, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
    g = dy * _as_row(scale, x)
    dx = r * (g - wide * (r * r * jnp.mean(wide * g, axis=-1, keepdims=True)))
    return dx.astype(x.dtype), _sum_of_rows(dy * (wide * r))


def _sum_of_rows(x: jax.Array) -> jax.Array:
    """[..., features] -> [features].

    XLA computes the sums of groups of rows in the pass that computes x and what else there is of
    the same operands. For the sum of all rows at once it would first write x to memory.
    """
    if not jax.sharding.get_abstract_mesh().explicit_axes:  # They may shard the rows.
        rows = math.prod(x.shape[:-1])
        groups = x.reshape(-1, math.gcd(rows, _GROUP), x.shape[-1])
        x = lax.optimization_barrier(jnp.sum(groups, axis=1))  # Two sums would become one.
    return jnp.sum(x, axis=tuple(range(x.ndim - 1)))


def _as_row(scale: jax.Array, x: jax.Array) -> jax.Array:
    return scale.reshape((1,) * (x.ndim - 1) + (-1,))


_normalized.defvjp(_forward, _backward)
