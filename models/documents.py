"""Documents that share a sequence and are kept apart.

Legend of shapes: B is batch, S sequence, M the largest number of documents in a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from collective_matmul import Segments, segments_of_lengths


class Documents(NamedTuple):
    """Which tokens of each sequence belong together. A pytree of arrays."""

    positions: jax.Array
    """The position of each token in its document, from 0: int32 [B, S]."""
    segments: Segments
    """The documents, as attention takes them."""


def locate_documents(lengths: jax.Array, sequence_length: int) -> Documents:
    """Finds the document and the position of each token.

    Args:
      lengths: int32 [B, M], the lengths of the documents in order, and then zeros.
      sequence_length: S, what the lengths of each sequence add up to.
    """
    segments = segments_of_lengths(lengths, sequence_length)
    starts = jnp.cumsum(lengths, axis=1, dtype=lengths.dtype) - lengths
    index = jnp.arange(sequence_length, dtype=lengths.dtype)[None]
    return Documents(index - jnp.take_along_axis(starts, segments.ids, axis=1), segments)
