"""Interpreted kernels that meet what differs on a GPU.

A GPU reads and overwrites other arrays beyond the border of one, where Pallas' interpreter stays
inside. Triton rounds to the largest number of 8 bits what is larger, which becomes NaN elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from collective_matmul.operands.scaled import scaling


@contextlib.contextmanager
def within_bounds(kernels: ModuleType) -> Iterator[None]:
    """Loads and stores of the kernels of a module, by its `plgpu`, which make NaN of all numbers if
    one that is not masked is outside of the array, and the largest number of whole ones."""
    load, store = kernels.plgpu.load, kernels.plgpu.store

    def checked_load(place: Any, *, mask: Any = None, **options: Any) -> jax.Array:
        return _spoilt_if(_is_outside(place, mask), load(place, mask=mask, **options))

    def checked_store(place: Any, value: jax.Array, *, mask: Any = None) -> None:
        store(place, _spoilt_if(_is_outside(place, mask), value), mask=mask)

    with (
        mock.patch.object(kernels.plgpu, "load", checked_load),
        mock.patch.object(kernels.plgpu, "store", checked_store),
    ):
        yield


def _is_outside(place: Any, mask: Any) -> jax.Array:
    indexer, outside = place.transforms[-1], jnp.bool(False)
    for index, size in zip(indexer.indices, indexer.shape, strict=True):
        if not hasattr(index, "size") or hasattr(index, "dtype"):  # Slices are inside.
            outside |= (index < 0) | (index >= size)
    return jnp.any(outside if mask is None else outside & mask)


def _spoilt_if(is_outside: jax.Array, value: jax.Array) -> jax.Array:
    is_whole = jnp.issubdtype(value.dtype, jnp.integer)
    spoilt = jnp.iinfo(value.dtype).max if is_whole else jnp.nan
    return jnp.where(is_outside, jnp.asarray(spoilt, value.dtype), value)


@contextlib.contextmanager
def rounds_as_triton(module: ModuleType) -> Iterator[None]:
    """Where `rounded` of this module is used, numbers too large become the largest of 8 bits."""

    def rounded(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
        largest = float(jnp.finfo(dtype).max)
        return scaling.rounded(jnp.clip(x, -largest * scale, largest * scale), scale, dtype)

    with mock.patch.object(module, "rounded", rounded):
        yield
