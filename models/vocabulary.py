"""Embedding and cross-entropy with the vocabulary sharded over the tensor axis.

Each device has V/D rows of the embedding and computes V/D columns of the logits. No device holds
the full logits: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def embed(tokens: jax.Array, table: jax.Array, axis_name: str) -> jax.Array:
    """Looks tokens up in a table with sharded rows, and scatters the result along the sequence.

    Args:
      tokens: int32 [B, S], the whole sequence on every device of the axis.
      table: [V/D, features], this device's rows.
      axis_name: the tensor axis.

    Returns:
      [B, S/D, features], this device's part of the sequence.
    """
    rows = _local_rows(tokens, table.shape[0], axis_name)
    # Rows of other devices are out of bounds and read as zero, so the sum is the row of the owner.
    found = table.at[rows].get(mode="fill", fill_value=0)
    return lax.psum_scatter(found, axis_name, scatter_dimension=1, tiled=True)


def cross_entropy(logits: jax.Array, targets: jax.Array, axis_name: str) -> jax.Array:
    """Minus the log-probability of each target, in nats.

    Args:
      logits: [B, S, V/D], this device's columns, any floating dtype; computed in float32.
      targets: int32 [B, S].
      axis_name: the tensor axis.

    Returns:
      float32 [B, S], the same on every device of the axis.
    """
    logits = logits.astype(jnp.float32)
    largest = lax.pmax(lax.stop_gradient(jnp.max(logits, axis=-1)), axis_name)
    normalizer = lax.psum(jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1), axis_name)
    columns = _local_rows(targets, logits.shape[-1], axis_name)
    found = jnp.take_along_axis(logits, columns[..., None], axis=-1, mode="fill", fill_value=0)
    return jnp.log(normalizer) + largest - lax.psum(found[..., 0], axis_name)


def _local_rows(tokens: jax.Array, size: int, axis_name: str) -> jax.Array:
    """Token indices relative to this device's first row; `size`, out of bounds, for other
    devices'."""
    rows = tokens - lax.axis_index(axis_name) * size
    return jnp.where((rows >= 0) & (rows < size), rows, size)
