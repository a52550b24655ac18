"""Checksums depend on every bit and every position, and on nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from models.checkpoint.checksums import ReplicaError, checksums, json_checksum

ARRAY = np.arange(2 * 3 * 8 * 4, dtype=np.float32).reshape(8, 24)


def mesh(data: int, tensor: int, axis_type: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    devices = jax.devices()[: data * tensor]
    axes = ("data", "tensor")
    return jax.make_mesh((data, tensor), axes, axis_types=(axis_type,) * 2, devices=devices)


def checksum(array: np.ndarray | jax.Array, spec: P | None = None, **options) -> str:
    if spec is not None:
        array = jax.device_put(array, NamedSharding(mesh(2, 4, **options), spec))
    return checksums({"x": jnp.asarray(array)})["x"]


def reference(array: np.ndarray) -> str:
    """The checksum of a float32 array, in NumPy."""

    def mixed(words: np.ndarray) -> np.ndarray:
        words = (words ^ words >> 16) * np.uint32(0x85EBCA6B)
        words = (words ^ words >> 13) * np.uint32(0xC2B2AE35)
        return words ^ words >> 16

    words = array.reshape(-1).view(np.uint32)
    position = np.arange(words.size, dtype=np.uint32)
    first = mixed(words + position * np.uint32(0x9E3779B1))
    second = mixed(words ^ mixed(position + np.uint32(0x85EBCA77)))
    return f"{first.sum(dtype=np.uint32):08x}{second.sum(dtype=np.uint32):08x}"


@pytest.mark.parametrize(
    "spec", [P(), P("data"), P(None, "tensor"), P("tensor", "data"), P(("tensor", "data"))]
)
def test_the_same_on_every_sharding(spec: P) -> None:
    assert checksum(ARRAY, spec) == checksum(ARRAY)


def test_the_same_with_explicit_axes() -> None:
    assert checksum(ARRAY, P("tensor"), axis_type=AxisType.Explicit) == checksum(ARRAY)


def test_the_value_is_the_one_that_earlier_checkpoints_hold() -> None:
    """Another formula would take every older checkpoint for a damaged one."""
    assert checksum(ARRAY) == reference(ARRAY) == "a14ff15c91a788c2"
    assert checksum(jnp.float32(1.5)) == reference(np.array([1.5], np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "int8", "bool"])
def test_every_bit_counts(dtype: str) -> None:
    original = jnp.ones((3, 5), dtype)
    size = original.dtype.itemsize
    seen = {checksum(original)}
    for element in range(original.size):
        for bit in range(8 * size if dtype != "bool" else 1):
            changed = np.array(original).view(np.uint8)
            changed.reshape(-1)[element * size + bit // 8] ^= 1 << bit % 8
            seen.add(checksum(changed.view(original.dtype)))
    assert len(seen) == 1 + original.size * (8 * size if dtype != "bool" else 1)


def test_every_position_counts() -> None:
    swapped = ARRAY.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert len({checksum(a) for a in (ARRAY, swapped, ARRAY[::-1], ARRAY.T)}) == 4


def test_signs_of_zero_and_bits_of_nan_count() -> None:
    nans = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    values = [np.array([0.0], np.float32), np.array([-0.0], np.float32), nans[:1], nans[1:]]
    assert len({checksum(value) for value in values}) == 4


def test_copies_that_differ_are_reported() -> None:
    sharding = NamedSharding(mesh(2, 4), P("tensor"))
    shards = [np.ones(2, np.float32) for _ in range(8)]
    shards[6][1] = 2
    arrays = [jax.device_put(s, d) for s, d in zip(shards, jax.devices(), strict=True)]
    broken = jax.make_array_from_single_device_arrays((8,), sharding, arrays)
    with pytest.raises(ReplicaError, match=r"^w differs between .*2.* and .*6.*, which should"):
        checksums({"w": broken})


def test_json_does_not_depend_on_the_order_of_keys() -> None:
    assert json_checksum({"a": 1, "b": [2.5]}) == json_checksum({"b": [2.5], "a": 1})
    assert json_checksum({"a": 1}) != json_checksum({"a": 2})
