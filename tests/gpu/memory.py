"""How much memory devices have left, and filling it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_SIMULATED_BYTES = 2**26


def piece_bytes() -> int:
    """Memory is filled in pieces of this size, which fit into the holes between other arrays."""
    return 2**26 if jax.default_backend() == "gpu" else 2**18


def free_bytes(device: Any) -> int:
    """Bytes that JAX may still allocate on a device; on simulated ones, of a limit made up here."""
    stats = device.memory_stats()
    if stats is not None:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    assert device.platform == "cpu", f"{device} does not say how much memory is in use"
    shards = (shard for array in jax.live_arrays() for shard in array.addressable_shards)
    return _SIMULATED_BYTES - sum(s.data.nbytes for s in shards if s.device == device)


def needed_bytes(program: Any) -> int:
    """Bytes that one run of a compiled program allocates on each device."""
    memory = program.memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes


@contextlib.contextmanager
def filled(mesh: Mesh, leave_bytes: int) -> Iterator[None]:
    """Fills the memory of a mesh's devices with NaNs, but for the bytes to be left on each."""
    pieces = []
    while min(map(free_bytes, mesh.devices.flat)) >= leave_bytes + piece_bytes():
        pieces.append(_piece(mesh)())
    jax.block_until_ready(pieces)
    yield
    pieces.clear()


@functools.cache
def _piece(mesh: Mesh) -> Any:
    shape, spec = (mesh.devices.size, piece_bytes() // 2), P(mesh.axis_names)
    nans = functools.partial(jnp.full, shape, jnp.nan, jnp.bfloat16)
    return jax.jit(nans, out_shardings=NamedSharding(mesh, spec))
