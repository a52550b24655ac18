"""Random keys of whole seeds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_SEEDS = 2**64


def check_seed(seed: int) -> None:
    """Raises ValueError unless `random_key` takes a seed."""
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"seed={seed}: expected a whole number from 0 to 2**64 - 1")


def random_key(seed: int) -> jax.Array:
    """The random key of a seed, a different one for each.

    `jax.random.key` gives the same keys, but only with 64-bit types enabled: without them it drops
    the upper 32 bits.

    Args:
      seed: from 0 to 2**64 - 1.

    Raises:
      ValueError: the seed is another number.
    """
    check_seed(seed)
    words = np.array([seed >> 32, seed % 2**32], np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")
