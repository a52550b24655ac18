"""Random operands, described before they exist: programs compile without them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding


@dataclass(frozen=True)
class RandomArray:
    """A leaf of a program's arguments. Leaves that are equal become one array.

    Attributes:
      shape: global.
      dtype: of the array.
      sharding: over the mesh.
      scale: standard deviation.
      seed: tells arrays of one shape apart.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding
    scale: float = 1.0
    seed: int = 0


def abstract(arguments: Any) -> Any:
    """The arguments as `jax.jit` lowers them."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
        arguments,
    )


def compile_maker(arguments: Sequence[Any]) -> Maker:
    """Compiles what makes every array that any of the arguments has."""
    leaves = dict.fromkeys(jax.tree.leaves(arguments))
    # Seeds are operands, so that XLA compiles one kernel for all arrays of a shape.
    seeds = np.array([leaf.seed for leaf in leaves], np.uint32)

    def make(seeds: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(
            jax.random.normal(jax.random.key(seed), leaf.shape, leaf.dtype) * leaf.scale
            for seed, leaf in zip(seeds, leaves, strict=True)
        )

    jitted = jax.jit(make, out_shardings=tuple(leaf.sharding for leaf in leaves))
    return Maker(list(leaves), jitted.lower(seeds).compile(), seeds)


@dataclass(frozen=True)
class Maker:
    """Makes arrays on the devices that keep them."""

    leaves: list[RandomArray]
    compiled: Any
    seeds: np.ndarray

    def __call__(self) -> Arrays:
        return Arrays(dict(zip(self.leaves, self.compiled(self.seeds), strict=True)))


@dataclass(frozen=True)
class Arrays:
    """What a `Maker` made."""

    by_leaf: dict[RandomArray, jax.Array]

    def fill(self, arguments: Any) -> Any:
        """The arguments with arrays for leaves."""
        return jax.tree.map(self.by_leaf.__getitem__, arguments)

    def bind(self, compiled: Callable, arguments: tuple[Any, ...]) -> Callable[[], Any]:
        """What runs a compiled program of these arguments once."""
        return functools.partial(compiled, *self.fill(arguments))
