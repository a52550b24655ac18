"""Embedding and cross-entropy with the vocabulary sharded over the tensor axis.

Each device has V/D rows of the embedding and computes V/D columns of the logits. No device holds
the full logits: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models.parameters.use import as_varying


def embed(
    tokens: jax.Array,
    table: jax.Array,
    axis_name: str,
    *,
    column_axis_name: str | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Looks tokens up in a table with sharded rows, and scatters the result along the sequence.

    A sequence that the axis does not divide, such as one token, is not scattered.

    A second axis may shard the batch and the columns of the table. Then each device looks up the
    tokens of all devices of that axis in its columns, and sends to each what is of its tokens. So
    tokens and activations travel, and not the table. The gradient is complete on its owner.

    Args:
      tokens: int32 [B, S], the whole sequence on every device of the axis.
      table: [V/D, features/F], this device's rows, and columns if a second axis shards them.
      axis_name: the tensor axis.
      column_axis_name: the second axis, of F devices; None: F is 1.
      dtype: of the result; default: that of the table, in which its gradient is summed.

    Returns:
      [B, S/D, features] in `dtype`, this device's part of the sequence; or [B, S, features], the
      same on every device.
    """
    if column_axis_name is not None:
        tokens = lax.all_gather(tokens, column_axis_name, axis=0, tiled=True)
    rows = _local_rows(tokens, table.shape[0], axis_name)
    table = as_varying(table, jax.typeof(rows).manual_axis_type.varying)
    # Rows of other devices are out of bounds and read as zero, so the sum is the row of the owner.
    found: Any = _look_up(table, rows, table.shape[0])
    found = found.astype(dtype or table.dtype)
    if tokens.shape[1] % lax.axis_size(axis_name):
        return lax.psum(found, axis_name)
    found = lax.psum_scatter(found, axis_name, scatter_dimension=1, tiled=True)
    if column_axis_name is None:
        return found
    return lax.all_to_all(found, column_axis_name, split_axis=0, concat_axis=2, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _look_up(table: jax.Array, rows: jax.Array, size: int) -> jax.Array:
    """[size, features] and int32 [B, S] -> [B, S, features].

    Without a barrier, XLA would look rows up again where the backward reads them, and keep a table
    that was gathered or cast until then.
    """
    del size
    return lax.optimization_barrier(table.at[rows].get(mode="fill", fill_value=0))


def _look_up_forward(table: jax.Array, rows: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    return _look_up(table, rows, size), rows


def _look_up_backward(size: int, rows: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
    """Adds gradients to zeros, which are made when the gradients are there. XLA would make them
    before a loop over blocks, and keep them through it."""
    zero = as_varying(jnp.zeros((), gradient.dtype), jax.typeof(gradient).manual_axis_type.varying)
    gradient, zero = lax.optimization_barrier((gradient, zero))
    zeros = jnp.broadcast_to(zero, (size, gradient.shape[-1]))
    return zeros.at[rows].add(gradient, mode="drop"), None


_look_up.defvjp(_look_up_forward, _look_up_backward)


def without_padding(logits: jax.Array, size: int, axis_name: str) -> jax.Array:
    """Gives columns past the vocabulary the smallest number, whose probability is zero.

    Args:
      logits: [B, S, V/D], this device's columns of a vocabulary that may be padded to V.
      size: number of tokens, at most V.
      axis_name: the tensor axis.
    """
    columns = logits.shape[-1]
    if columns * lax.axis_size(axis_name) == size:
        return logits
    first = lax.axis_index(axis_name) * columns
    is_token = first + lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) < size
    return jnp.where(is_token, logits, jnp.finfo(logits.dtype).min)


@jax.named_scope("loss")
def cross_entropy(logits: jax.Array, targets: jax.Array, axis_name: str) -> jax.Array:
    """Minus the log-probability of each target, in nats.

    Computed in float32, but neither the logits nor their gradient are ever stored in it.

    Args:
      logits: [B, S, V/D], this device's columns, any floating dtype.
      targets: int32 [B, S].
      axis_name: the tensor axis.

    Returns:
      float32 [B, S], the same on every device of the axis.
    """
    columns = _local_rows(targets, logits.shape[-1], axis_name)
    return _cross_entropy(logits, columns, axis_name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cross_entropy(logits: jax.Array, columns: jax.Array, axis_name: str) -> jax.Array:
    """Computes losses of targets as columns of the local logits; V/D stands for other devices'."""
    return _forward(logits, columns, axis_name)[0]


def _forward(logits: jax.Array, columns: jax.Array, axis_name: str) -> tuple[jax.Array, tuple]:
    """The losses, and what the backward needs: float32 [B, S] beside the arguments."""
    largest, total = _largest_and_sum(logits.astype(jnp.float32))
    found = jnp.take_along_axis(logits, columns[..., None], axis=-1, mode="fill", fill_value=0)
    parts = jnp.stack([largest, total, found[..., 0].astype(jnp.float32)])
    # One collective of three numbers per token instead of three that wait for each other.
    largest, total, found = jnp.moveaxis(lax.all_gather(parts, axis_name, to="invarying"), 1, 0)
    shared = jnp.max(largest, axis=0, keepdims=True)
    log_normalizer = shared[0] + jnp.log(jnp.sum(total * jnp.exp(largest - shared), axis=0))
    return log_normalizer - jnp.sum(found, axis=0), (logits, columns, log_normalizer)


def _largest_and_sum(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest logit m of each row, and the sum of ``exp(logit - m)``: two of [B, S].

    One pass over the logits: Milakov and Gimelshein, "Online normalizer calculation for softmax",
    2018.
    """

    def joined(some: tuple, others: tuple) -> tuple[jax.Array, jax.Array]:
        (largest, total), (other_largest, other_total) = some, others
        factor = jnp.exp(-jnp.abs(largest - other_largest))
        is_larger = largest >= other_largest
        total, other_total = (
            lax.select(is_larger, total, total * factor),
            lax.select(is_larger, other_total * factor, other_total),
        )
        return lax.max(largest, other_largest), total + other_total

    least = np.finfo(np.float32).min  # The difference of infinities would be no number.
    finite = lax.max(logits, jnp.full_like(logits, least))
    terms, nothing = (finite, jnp.ones_like(logits)), (least, np.float32(0))
    return lax.reduce(terms, nothing, joined, (logits.ndim - 1,))


def _backward(
    axis_name: str, residuals: tuple[jax.Array, jax.Array, jax.Array], gradients: jax.Array
) -> tuple[jax.Array, None]:
    """Softmax minus one-hot, by comparison: a scatter would need an array of the logits' size."""
    logits, columns, log_normalizer = residuals
    probabilities = jnp.exp(logits.astype(jnp.float32) - log_normalizer[..., None])
    vocabulary = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_target = vocabulary == columns[..., None]
    return ((probabilities - is_target) * gradients[..., None]).astype(logits.dtype), None


_cross_entropy.defvjp(_forward, _backward)


def _local_rows(tokens: jax.Array, size: int, axis_name: str) -> jax.Array:
    """Token indices relative to this device's first row; `size`, out of bounds, for other
    devices'."""
    rows = tokens - lax.axis_index(axis_name) * size
    return jnp.where((rows >= 0) & (rows < size), rows, size)
