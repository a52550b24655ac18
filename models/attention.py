"""Causal attention by the fastest kernel for the device.

Legend of local shapes: B is batch, S sequence, N query heads, K key and value heads, H head size.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Grouped-query attention with a causal mask; K divides N.

    Uses cuDNN's kernel where it is supported: on GPUs, in half precision, for head sizes that are
    multiples of 8 up to 128. Uses XLA's matmuls elsewhere.

    Args:
      query: [B, S, N, H].
      key: [B, S, K, H].
      value: [B, S, K, H].

    Returns:
      [B, S, N, H].
    """
    half = query.dtype in (jnp.bfloat16, jnp.float16)
    head_size = query.shape[-1]
    if not half or head_size % 8 or head_size > 128 or not _for_gpus():
        return _attend(query, key, value, "xla")
    if jax.default_backend() == "gpu":
        return _attend(query, key, value, "cudnn")
    return _with_residuals_of_cudnn(query, key, value)


def _for_gpus() -> bool:
    """Whether the trace is for GPUs, present or described by the mesh alone."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() == "gpu" or (device is not None and device.platform == "gpu")


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, implementation: Any) -> jax.Array:
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation=implementation
    )


@jax.custom_vjp
def _with_residuals_of_cudnn(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention for traces where cuDNN's kernel cannot be lowered, without CUDA.

    Saves as much for the backward as cuDNN's kernel, so that a dry run counts the right bytes.
    """
    return _attend(query, key, value, "xla")


def _forward(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, tuple]:
    attended = _with_residuals_of_cudnn(query, key, value)
    # Stands for the log-sum-exp of the scores, [B, N, S].
    log_sum_exp = jnp.swapaxes(query[..., 0], 1, 2).astype(jnp.float32)
    return attended, (query, key, value, attended, log_sum_exp)


def _backward(residuals: tuple, cotangent: jax.Array) -> tuple[jax.Array, ...]:
    query, key, value, *_ = residuals
    _, transpose = jax.vjp(functools.partial(_attend, implementation="xla"), query, key, value)
    return transpose(cotangent)


_with_residuals_of_cudnn.defvjp(_forward, _backward)
