"""Checksums of the contents of arrays, computed by the devices that hold them.

A checksum is a function of the elements' bits and positions in the global array alone: sums over
elements modulo 2^32 do not depend on their order, so every mesh and sharding has the same. It
detects accidents, not attacks.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class ReplicaError(ArithmeticError):
    """Devices that should hold copies of the same data hold different data."""


def checksums(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    """Name -> checksum, 16 hexadecimal digits, of global arrays.

    Every device reads its own shards once, and 8 bytes per shard travel to the host. All sums are
    started before the first is waited for.

    Raises:
      ReplicaError: devices that hold the same shard of an array hold different bits.
    """
    arrays = {name: _on_named_mesh(array) for name, array in arrays.items()}
    started = {name: _shard_sums(array.sharding)(array) for name, array in arrays.items()}
    sums = _on_every_process(started)
    return {name: _combined(name, array, sums[name]) for name, array in arrays.items()}


def json_checksum(value: Any) -> str:
    """A checksum of a JSON value, independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _on_every_process(sums: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    if jax.process_count() > 1 and sums:
        sharding = next(iter(sums.values())).sharding
        assert isinstance(sharding, NamedSharding)
        everywhere = NamedSharding(sharding.mesh, P())
        sums = jax.jit(lambda arrays: arrays, out_shardings=everywhere)(sums)
    return jax.device_get(sums)


def _combined(name: str, array: jax.Array, sums: np.ndarray) -> str:
    """The checksum from the sums of all devices, uint32 [devices, 2]. Copies count once."""
    distinct: dict[tuple[tuple[int | None, int | None], ...], tuple[Any, np.ndarray]] = {}
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    indices = sharding.devices_indices_map(array.shape)
    for device, own in zip(sharding.mesh.devices.flat, sums, strict=True):
        shard = tuple((part.start, part.stop) for part in indices[device])
        other, same = distinct.setdefault(shard, (device, own))
        if (own != same).any():
            raise ReplicaError(
                f"{name} differs between {other} and {device}, which should hold copies of the same"
                " values; one of them computes wrong results"
            )
    total = sum(own.astype(np.uint64) for _, own in distinct.values())
    return "".join(f"{int(part) % 2**32:08x}" for part in np.broadcast_to(total, 2))


def _on_named_mesh(array: jax.Array) -> jax.Array:
    if isinstance(array.sharding, NamedSharding):
        return array
    devices = sorted(array.sharding.device_set, key=lambda device: device.id)
    return jax.device_put(array, NamedSharding(Mesh(np.array(devices), ("devices",)), P()))


@functools.cache
def _shard_sums(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """The sums of every device's shard: global array -> uint32 [devices, 2]."""
    mesh, spec = sharding.mesh, sharding.spec

    def sums(shard: jax.Array) -> jax.Array:
        words, position = _words(shard), jnp.zeros((), jnp.uint32)
        axes = [*spec, *[None] * (words.ndim - len(spec))]
        for dimension, names in enumerate(axes):
            size = words.shape[dimension]
            # A shard begins where those before it along the axis end.
            start = lax.axis_index(names) * size if names else 0
            total = size * (lax.axis_size(names) if names else 1)
            coordinate = lax.broadcasted_iota(jnp.uint32, words.shape, dimension)
            coordinate += jnp.uint32(start)
            position = position * jnp.uint32(total % 2**32) + coordinate
        first = _mixed(words + position * jnp.uint32(0x9E3779B1))
        second = _mixed(words ^ _mixed(position + jnp.uint32(0x85EBCA77)))
        # One reduction of both compiles in half the time of two.
        zero, dimensions = jnp.uint32(0), tuple(range(words.ndim))
        both = lax.reduce((first, second), (zero, zero), _added, dimensions)
        return jnp.stack(both)[None]

    return jax.jit(
        jax.shard_map(sums, mesh=mesh, in_specs=spec, out_specs=P(mesh.axis_names), check_vma=False)
    )


def _added(x: Sequence[jax.Array], y: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(lax.add(a, b) for a, b in zip(x, y, strict=True))


def _words(shard: jax.Array) -> jax.Array:
    """The bits of every element as uint32; of a 64-bit element as two, in a last dimension."""
    if shard.dtype == jnp.bool_:
        return shard.astype(jnp.uint32)
    if shard.dtype.itemsize >= 4:
        return lax.bitcast_convert_type(shard, jnp.uint32)
    return lax.bitcast_convert_type(shard, f"uint{8 * shard.dtype.itemsize}").astype(jnp.uint32)


def _mixed(words: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every bit depends on every bit: MurmurHash3's finalizer."""
    words ^= words >> jnp.uint32(16)
    words *= jnp.uint32(0x85EBCA6B)
    words ^= words >> jnp.uint32(13)
    words *= jnp.uint32(0xC2B2AE35)
    return words ^ (words >> jnp.uint32(16))
