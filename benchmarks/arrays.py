"""Random operands, described before they exist: programs compile without them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from collective_matmul.tuning.repeated_site import filler


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
    jitted = {leaf: filler(abstract(leaf), leaf.scale) for leaf in leaves}
    # Arrays that differ by their seeds alone are made by the same executable.
    compiled = {fill: fill.lower(np.uint32(0)).compile() for fill in set(jitted.values())}
    return Maker({leaf: compiled[fill] for leaf, fill in jitted.items()})


@dataclass(frozen=True)
class Maker:
    """Makes arrays on the devices that keep them.

    Attributes:
      compiled: for every array what makes it of its seed.
    """

    compiled: Mapping[RandomArray, Callable[[np.uint32], jax.Array]]

    def __call__(self) -> Arrays:
        return Arrays({leaf: fill(np.uint32(leaf.seed)) for leaf, fill in self.compiled.items()})


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
