"""The tokens that a device sends to each other one, in blocks of a static size.

A token goes to each device that has one of its experts, once. A block has C slots, the capacity.
Offset o names the device o places after this one. At offset 0 tokens stay and need no slot.

Legend: T tokens of a device, k experts of each, D devices, C slots of a block, n the most devices
that a token goes to.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Slots(NamedTuple):
    """The slots in which a device's tokens travel, and those of their results.

    Attributes:
      overflow: bool scalar, whether a token has no slot in a block that it belongs to.
      tokens: int32 [D - 1, C], the token in each slot of the blocks for offsets 1 to D - 1; T if
        the slot is empty.
      places: int32 [T, n], the rows of a token's results among T of its own device, followed by the
        slots of all blocks, in this order; T + (D - 1) C for no row.
    """

    overflow: jax.Array
    tokens: jax.Array
    places: jax.Array


def assign_slots(owners: jax.Array, targets: jax.Array, capacity: int, copies: int) -> Slots:
    """Gives each token a slot in each block that it belongs to, in the order of tokens.

    Args:
      owners: int32 [T, k], the number of the owner of each of a token's experts; negative for none.
      targets: int32 [D], the number of the owner that the device at each offset is. Several devices
        are one owner if they divide hidden features.
      capacity: C.
      copies: n.
    """
    tokens, devices = owners.shape[0], targets.shape[0]
    goes = jnp.any(owners[:, :, None] == targets[None, None, :], axis=1)
    number = lax.iota(jnp.int32, tokens)[:, None]
    slots = jnp.cumsum(goes[:, 1:], axis=0, dtype=jnp.int32) - 1
    fits = goes[:, 1:] & (slots < capacity)
    block = lax.iota(jnp.int32, devices - 1)[None, :] * np.int32(capacity)
    none = np.int32((devices - 1) * capacity)
    slot = jnp.where(fits, block + slots, none)
    sent = jnp.full((int(none),), tokens, jnp.int32).at[slot].set(number, mode="drop")
    own = jnp.where(goes[:, :1], number, tokens + none)
    places = lax.sort(lax.concatenate([own, tokens + slot], 1), dimension=1)[:, :copies]
    overflow = jnp.any(goes[:, 1:] & ~fits)
    return Slots(overflow, sent.reshape(devices - 1, capacity), places)
