"""Segments: parts of a sequence, such as documents, whose tokens attend to their own part only.

Legend of shapes: B is batch, S sequence, M the largest number of segments in a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

#: cuDNN's backward needs a workspace for as many blocks as there are segments. Up to this many
#: segments in a sequence, a block is the whole sequence: several packs are slower.
SEGMENTS_OF_ONE_PACK = 64
#: How much shorter the blocks of each further pack are.
_RATIO = 8
_SHORTEST_BLOCK = 32


class Pack(NamedTuple):
    """Segments of similar length, for a kernel that works on blocks of as many tokens.

    The sequences are cut into b blocks of B * S / b tokens. A segment is entered in the block in
    which it begins, and may continue in the next one. It is at most as long as a block.
    """

    starts: jax.Array
    """Offsets of segments in their block; then -1: int32 [b, segments]."""
    lengths: jax.Array
    """The lengths of these segments; then -1: int32 [b, segments]."""
    members: jax.Array
    """Whether each token is of one of them: bool [B, S]."""

    def of_sequences(self, chosen: slice) -> Pack:
        """The pack of some of the sequences."""
        blocks = len(self.starts) // len(self.members)
        rows = slice(chosen.start * blocks, chosen.stop * blocks)
        return Pack(self.starts[rows], self.lengths[rows], self.members[chosen])


class Segments(NamedTuple):
    """The segments of tokens that belong together, in each sequence. A pytree of arrays."""

    ids: jax.Array
    """The number of each token's segment within its sequence, from 0: int32 [B, S]."""
    lengths: jax.Array
    """The lengths of the segments in order, and then zeros: int32 [B, M]."""
    packs: tuple[Pack, ...]
    """All segments, each in one pack. If no sequence has two segments, there are none."""

    @property
    def most(self) -> int:
        """The largest number of segments in a sequence, M."""
        return self.lengths.shape[1]

    @property
    def offsets(self) -> jax.Array:
        """Offsets of all segments in the batch, read as one sequence, int32 [B * M + 1].

        The last number is the number of tokens.
        """
        ends = jnp.cumsum(self.lengths.reshape(-1), dtype=jnp.int32)
        return jnp.concatenate([jnp.zeros_like(ends[:1]), ends])

    @property
    def mask(self) -> jax.Array:
        """Whether two tokens are of one segment, bool [B, 1, S, S]."""
        return self.ids[:, None, :, None] == self.ids[:, None, None, :]


def segments_of_lengths(lengths: jax.Array, sequence_length: int) -> Segments:
    """Finds the segment of each token.

    Args:
      lengths: integers [B, M], the lengths of the segments in order, and then zeros.
      sequence_length: S, what the lengths of each sequence add up to. What is left of a sequence
        is of the last segment.

    Raises:
      ValueError, TypeError: for lengths that are not so.
    """
    _check("lengths", lengths)
    ends = jnp.cumsum(jnp.asarray(lengths, jnp.int32), axis=1, dtype=jnp.int32)
    ends = jnp.minimum(ends, sequence_length).at[:, -1].set(sequence_length)
    lengths = ends - jnp.pad(ends[:, :-1], ((0, 0), (1, 0)))
    index = jnp.arange(sequence_length, dtype=jnp.int32)[None, :, None]
    ids = jnp.sum(index >= ends[:, None, :], axis=2, dtype=jnp.int32)
    return _with_packs(ids, lengths)


def segments_of_ids(ids: jax.Array, most: int) -> Segments:
    """Numbers segments from 0.

    Each change of the id begins a segment, also one to padding, or to an id that was there before.

    Args:
      ids: integers [B, S].
      most: M, at least the number of segments of any sequence. Further ones are joined to the last.

    Raises:
      ValueError, TypeError: for ids that are not so.
    """
    _check("ids", ids)
    changes = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    ids = jnp.minimum(jnp.cumsum(changes, axis=1, dtype=jnp.int32), most - 1)
    numbers = jnp.arange(most, dtype=jnp.int32)
    lengths = jnp.sum(ids[:, :, None] == numbers[None, None], axis=1, dtype=jnp.int32)
    return _with_packs(ids, lengths)


def _check(name: str, array: jax.Array) -> None:
    if len(getattr(array, "shape", ())) != 2 or array.shape[1] < 1:
        raise ValueError(
            f"{name} of shape {getattr(array, 'shape', None)}: expected an array [batch, n], n >= 1"
        )
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} of dtype {array.dtype}: expected integers")


def _with_packs(ids: jax.Array, lengths: jax.Array) -> Segments:
    own_length = jnp.take_along_axis(lengths, ids, axis=1)
    packs = tuple(
        _pack(lengths, own_length, *kind) for kind in _kinds(ids.shape[1], lengths.shape[1])
    )
    return Segments(ids, lengths, packs)


def _kinds(sequence_length: int, segments: int) -> list[tuple[int, int, int]]:
    """Describes packs: the tokens of a block, how many segments may begin in one, a length.

    All segments of a pack are longer than that length. The workspace of cuDNN's backward is
    proportional to the number of segments. Those that are longer than an eighth of a block begin
    in it at most eight times.
    """
    if segments == 1:
        return []
    if segments <= SEGMENTS_OF_ONE_PACK:
        return [(sequence_length, segments, 0)]
    kinds, block = [], sequence_length
    while block > _SHORTEST_BLOCK and block % _RATIO == 0:
        kinds.append((block, _RATIO, block // _RATIO))
        block //= _RATIO
    return [*kinds, (block, min(block, segments), 0)]


def _pack(
    lengths: jax.Array, own_length: jax.Array, block: int, capacity: int, shortest: int
) -> Pack:
    def belongs(lengths: jax.Array) -> jax.Array:
        return (lengths > shortest) & (lengths <= block)

    def enter(lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The segments of one sequence, [M], entered in its blocks."""
        starts = jnp.cumsum(lengths, dtype=jnp.int32) - lengths
        chosen = belongs(lengths)
        counted = chosen.astype(jnp.int32)
        number = jnp.cumsum(counted, dtype=jnp.int32) - counted
        blocks = starts // block
        # Segments of earlier blocks come first in the order of all.
        earlier = jnp.zeros(block_count, jnp.int32).at[blocks].add(counted, mode="drop")
        earlier = jnp.cumsum(earlier, dtype=jnp.int32) - earlier
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
