"""Documents that share a sequence and are kept apart.

Legend of shapes: B is batch, S sequence, M the largest number of documents in a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Documents(NamedTuple):
    """Which tokens of each sequence belong together. A pytree of arrays."""

    lengths: jax.Array
    """The lengths of the documents, in order, and then zeros: int32 [B, M]. They add up to S."""
    ids: jax.Array
    """The number of each token's document within its sequence, from 0: int32 [B, S]."""
    positions: jax.Array
    """The position of each token in its document, from 0: int32 [B, S]."""

    @property
    def mask(self) -> jax.Array:
        """Whether two tokens are of one document: bool [B, 1, S, S]."""
        return self.ids[:, None, :, None] == self.ids[:, None, None, :]


def locate_documents(lengths: jax.Array, sequence_length: int) -> Documents:
    """Finds the document and the position of each token.

    Args:
      lengths: int32 [B, M], the lengths of the documents in order, and then zeros.
      sequence_length: S, what the lengths of each sequence add up to.
    """
    index = jnp.arange(sequence_length, dtype=lengths.dtype)[None]
    ends = jnp.cumsum(lengths, axis=1)
    ids = jnp.sum(index[:, :, None] >= ends[:, None, :], axis=2, dtype=lengths.dtype)
    starts = jnp.take_along_axis(ends - lengths, ids, axis=1)
    return Documents(lengths, ids, index - starts)
