"""The root-mean-square norm."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

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


#: The backward of a norm keeps its operands and this float32 number per row, and no more.
_INVERSE_RMS = "inverse_rms"


@functools.partial(
    jax.checkpoint,
    policy=jax.checkpoint_policies.save_only_these_names(_INVERSE_RMS),
    prevent_cse=False,
    static_argnums=2,
)
def _normalize(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    inverse_rms = checkpoint_name(jax.lax.rsqrt(mean_square + epsilon), _INVERSE_RMS)
    scale = scale.reshape((1,) * (x.ndim - 1) + (-1,))
    return (wide * inverse_rms * scale).astype(x.dtype)
