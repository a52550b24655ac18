"""Causal attention, by the kernel that the GPUs have for it.

Legend of local shapes: B batch, S sequence, N heads, K heads of keys and values, H head size.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """query [B, S, N, H], key and value [B, S, K, H] -> [B, S, N, H]; K divides N.

    cuDNN's kernel where it runs: on GPUs, in half precision, for head sizes it knows; else XLA's.
    """
    half = query.dtype in (jnp.bfloat16, jnp.float16)
    head_size = query.shape[-1]
    if not half or head_size % 8 or head_size > 128 or not _for_gpus():
        return _attend(query, key, value, "xla")
    if jax.default_backend() == "gpu":
        return _attend(query, key, value, "cudnn")
    return _kept_as_by_cudnn(query, key, value)


def _for_gpus() -> bool:
    """Whether what is traced is for GPUs, be they here or only described by its mesh."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() == "gpu" or (device is not None and device.platform == "gpu")


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, implementation: Any) -> jax.Array:
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation=implementation
    )


@jax.custom_vjp
def _kept_as_by_cudnn(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """What is traced where cuDNN's kernel cannot be, without CUDA: its backward needs no more."""
    return _attend(query, key, value, "xla")


def _forward(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, tuple]:
    attended = _kept_as_by_cudnn(query, key, value)
    # As many as the logarithms of the softmax's sums, [B, N, S].
    logarithms = jnp.swapaxes(query[..., 0], 1, 2).astype(jnp.float32)
    return attended, (query, key, value, attended, logarithms)


def _backward(kept: tuple, cotangent: jax.Array) -> tuple[jax.Array, ...]:
    query, key, value, *_ = kept
    _, transpose = jax.vjp(functools.partial(_attend, implementation="xla"), query, key, value)
    return transpose(cotangent)


_kept_as_by_cudnn.defvjp(_forward, _backward)
