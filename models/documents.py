"""Documents that share a sequence and are kept apart.

Legend of shapes: B is batch, S sequence, M the largest number of documents in a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

#: cuDNN's backward needs a workspace for as many blocks as there are documents. Up to this many
#: documents in a sequence, a block is the whole sequence: several packs are slower.
DOCUMENTS_OF_ONE_PACK = 64
#: How much shorter the blocks of each further pack are.
_RATIO = 8
_SHORTEST_BLOCK = 32


class Pack(NamedTuple):
    """Documents of similar length, for a kernel that works on blocks of as many tokens.

    The sequences are cut into b blocks of B * S / b tokens. A document is entered in the block in
    which it begins, and may continue in the next one. It is at most as long as a block.
    """

    starts: jax.Array
    """Where documents begin, relative to their block; then -1: int32 [b, documents]."""
    lengths: jax.Array
    """The lengths of these documents; then -1: int32 [b, documents]."""
    members: jax.Array
    """Whether each token is of one of them: bool [B, S]."""

    def of_sequences(self, chosen: slice) -> Pack:
        """The pack of some of the sequences."""
        blocks = len(self.starts) // len(self.members)
        rows = slice(chosen.start * blocks, chosen.stop * blocks)
        return Pack(self.starts[rows], self.lengths[rows], self.members[chosen])


class Documents(NamedTuple):
    """Which tokens of each sequence belong together. A pytree of arrays."""

    ids: jax.Array
    """The number of each token's document within its sequence, from 0: int32 [B, S]."""
    positions: jax.Array
    """The position of each token in its document, from 0: int32 [B, S]."""
    packs: tuple[Pack, ...]
    """All documents, each in one pack. If no sequence has two documents, there are none."""

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
    positions = index - jnp.take_along_axis(ends - lengths, ids, axis=1)
    own_length = jnp.take_along_axis(lengths, ids, axis=1)
    packs = tuple(
        _pack(lengths, own_length, *kind) for kind in _kinds(sequence_length, lengths.shape[1])
    )
    return Documents(ids, positions, packs)


def _kinds(sequence_length: int, documents: int) -> list[tuple[int, int, int]]:
    """For each pack: tokens of a block, largest number of documents that begin in one, and the
    length that all of its documents exceed.

    The workspace of cuDNN's backward is proportional to the largest number. Documents that are
    longer than an eighth of a block begin in it at most eight times.
    """
    if documents == 1:
        return []
    if documents <= DOCUMENTS_OF_ONE_PACK:
        return [(sequence_length, documents, 0)]
    kinds, block = [], sequence_length
    while block > _SHORTEST_BLOCK and block % _RATIO == 0:
        kinds.append((block, _RATIO, block // _RATIO))
        block //= _RATIO
    return [*kinds, (block, min(block, documents), 0)]


def _pack(
    lengths: jax.Array, own_length: jax.Array, block: int, capacity: int, shortest: int
) -> Pack:
    def belongs(lengths: jax.Array) -> jax.Array:
        return (lengths > shortest) & (lengths <= block)

    def enter(lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The documents of one sequence, [M], entered in its blocks."""
        starts = jnp.cumsum(lengths) - lengths
        chosen = belongs(lengths)
        number = jnp.cumsum(chosen) - chosen
        blocks = starts // block
        # Documents of earlier blocks come first in the order of all.
        earlier = jnp.zeros(block_count, number.dtype).at[blocks].add(chosen, mode="drop")
        earlier = jnp.cumsum(earlier) - earlier
        column = number - earlier[jnp.minimum(blocks, block_count - 1)]
        place = jnp.where(chosen, blocks, block_count), column
        empty = jnp.full((block_count, capacity), -1, lengths.dtype)
        return (
            empty.at[place].set(starts - blocks * block, mode="drop"),
            empty.at[place].set(lengths, mode="drop"),
        )

    block_count = own_length.shape[1] // block
    starts, entered = jax.vmap(enter)(lengths)
    shape = (-1, capacity)
    return Pack(starts.reshape(shape), entered.reshape(shape), belongs(own_length))
