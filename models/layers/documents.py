"""Documents that share a sequence and are kept apart, and the positions of tokens.

Legend of shapes: B is batch, S sequence, M the largest number of documents in a sequence, C the
size of a mesh axis that divides sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul import Segments, segments_of_lengths


class Documents(NamedTuple):
    """Which tokens of each sequence belong together. A pytree of arrays.

    Of sequences that a mesh axis divides, it has this device's tokens.
    """

    positions: jax.Array
    """The position of each token in its document, from 0: int32 [B, S], or [1, S] if all are the
    same."""
    segments: Segments | None
    """The documents, as attention takes them; None: each sequence is one. Of sequences that are
    divided, the numbers of this device's tokens, the lengths in the whole sequences, and no
    packs."""


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


def locate_part(lengths: jax.Array | None, length: int, axis_name: str) -> Documents:
    """Finds the document and the position of each token of this device's part of sequences.

    Args:
      lengths: int32 [B, M], as `locate_documents` takes them, of the whole sequences; None: each
        sequence is one document.
      length: S/C, the number of tokens of the part.
      axis_name: the mesh axis, of C devices, over which sequences are divided in zigzag layout.
    """
    device, last = lax.axis_index(axis_name), 2 * lax.axis_size(axis_name) - 1
    steps = jnp.arange(length // 2, dtype=jnp.int32)
    chunks = (device * len(steps), (last - device) * len(steps))
    places = jnp.concatenate([chunk.astype(jnp.int32) + steps for chunk in chunks])[None]
    if lengths is None:
        return Documents(places, None)
    lengths = lengths.astype(jnp.int32)
    ends = jnp.cumsum(lengths, axis=1, dtype=jnp.int32)
    # Zeros behind the documents end where the last one does.
    ids = jnp.sum(places[:, :, None] >= ends[:, None, :], axis=2, dtype=jnp.int32)
    starts = jnp.take_along_axis(ends - lengths, ids, axis=1)
    return Documents(places - starts, Segments(ids, lengths, ()))
