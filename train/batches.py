"""Batches as global arrays, of which each process has the rows of its own devices."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import NamedSharding


def local_rows(sharding: NamedSharding, rows: int) -> np.ndarray:
    """The rows of a global array [rows, ...] that devices of this process hold, in order."""
    parts = sharding.addressable_devices_indices_map((rows, 1)).values()
    bounds = {part[0].indices(rows)[:2] for part in parts if part is not None}
    return np.concatenate([np.arange(*bound) for bound in sorted(bounds)])


def global_arrays(
    arrays: Mapping[str, np.ndarray], sharding: NamedSharding, rows: int
) -> dict[str, jax.Array]:
    """Global arrays [rows, ...] from the `local_rows` that each process has."""
    return {
        name: jax.make_array_from_process_local_data(sharding, array, (rows, *array.shape[1:]))
        for name, array in arrays.items()
    }
