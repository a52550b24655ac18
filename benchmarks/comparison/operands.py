"""Random operands of programs, described before they exist: programs compile without them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.comparison.communication import ROWS
from benchmarks.internals import filler


@dataclass(frozen=True)
class RandomArray:
    """A leaf of a program's arguments. Leaves that are equal become one array.

    Attributes:
      shape: global.
      dtype: the array's dtype.
      sharding: over the mesh.
      scale: standard deviation.
      seed: distinguishes arrays of one shape.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding
    scale: float = 1.0
    seed: int = 0


class Operands:
    """Describes the arrays of programs on one mesh."""

    def __init__(self, mesh: Mesh, dtype: np.dtype):
        self.mesh, self.dtype = mesh, dtype

    def with_explicit_axes(self) -> Operands:
        """These operands on a mesh whose axes are Explicit."""
        names = self.mesh.axis_names
        types = (AxisType.Explicit,) * len(names)
        return Operands(Mesh(self.mesh.devices, names, axis_types=types), self.dtype)

    def weight(self, spec: P, rows: int, columns: int, seed: int) -> RandomArray:
        """[rows, columns], scaled so that products have the scale of what it multiplies."""
        return self._array(spec, (rows, columns), 1 / math.sqrt(rows), seed)

    def activations(self, spec: P, rows: int, columns: int, seed: int = 0) -> RandomArray:
        """[rows, columns], of scale 1."""
        return self._array(spec, (rows, columns), 1.0, seed)

    def both(self, rows: int, columns: int, seed: int = 0) -> tuple[RandomArray, RandomArray]:
        """Global [rows, columns], sharded; and the same with all rows on every device."""
        return (
            self.activations(ROWS, rows, columns, seed),
            self.activations(ROWS, self.mesh.devices.size * rows, columns, seed),
        )

    def _array(self, spec: P, shape: tuple[int, int], scale: float, seed: int) -> RandomArray:
        return RandomArray(shape, self.dtype, NamedSharding(self.mesh, spec), scale, seed)


def abstract(arguments: Any) -> Any:
    """The arguments as `jax.jit` lowers them."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
        arguments,
    )


def compile_maker(arguments: Sequence[Any]) -> Callable[[], Arrays]:
    """Compiles what makes every array that any of the arguments has, on the devices."""
    leaves = dict.fromkeys(jax.tree.leaves(arguments))
    jitted = {leaf: filler(abstract(leaf), leaf.scale) for leaf in leaves}
    # Arrays that differ by their seeds alone are made by the same executable.
    fills = dict.fromkeys(jitted.values())  # In one order, as processes compile them together.
    compiled = {fill: fill.lower(np.uint32(0)).compile() for fill in fills}
    return lambda: Arrays({leaf: compiled[jitted[leaf]](np.uint32(leaf.seed)) for leaf in leaves})


@dataclass(frozen=True)
class Arrays:
    """The arrays of some programs, by their descriptions."""

    by_leaf: Mapping[RandomArray, jax.Array]

    def fill(self, arguments: Any) -> Any:
        """The arguments with arrays for leaves."""
        return jax.tree.map(self.by_leaf.__getitem__, arguments)

    def bind(self, compiled: Callable, arguments: tuple[Any, ...]) -> Callable[[], Any]:
        """A function that runs a compiled program of these arguments once."""
        return functools.partial(compiled, *self.fill(arguments))
