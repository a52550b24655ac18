"""What the programs of all benchmarks have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.arrays import RandomArray
from benchmarks.communication import ROWS, Communication, Rows

Direction = Literal["forward", "forward_backward"]


class Program(NamedTuple):
    """A function, and its arguments: a pytree of `RandomArray`."""

    fun: Callable
    arguments: tuple[Any, ...]


class Operands:
    """Describes the arrays of programs on one mesh."""

    def __init__(self, mesh: Mesh, dtype: np.dtype):
        self.mesh, self.dtype = mesh, dtype

    def weight(self, spec: P, rows: int, columns: int, seed: int) -> RandomArray:
        """[rows, columns], scaled so that it keeps the scale of what it multiplies."""
        return self._array(spec, (rows, columns), 1 / math.sqrt(rows), seed)

    def activations(self, spec: P, rows: int, columns: int, seed: int = 0) -> RandomArray:
        """[rows, columns], of scale 1."""
        return self._array(spec, (rows, columns), 1.0, seed)

    def rows(self, communication: Communication, rows: int, columns: int, seed: int = 0) -> Rows:
        """Rows to gather, or as they were scattered."""
        shard = self.activations(ROWS, rows, columns, seed)
        whole = self.activations(ROWS, self.mesh.devices.size * rows, columns, seed)
        return communication.rows(shard, whole)

    def _array(self, spec: P, shape: tuple[int, int], scale: float, seed: int) -> RandomArray:
        return RandomArray(shape, self.dtype, NamedSharding(self.mesh, spec), scale, seed)


def place(
    communication: Communication, mesh: Mesh, fun: Callable, in_specs: Any, out_specs: Any
) -> Callable:
    """The function of global arrays, local inside where the communication wants that."""
    if not communication.on_shards:
        return fun
    return jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def with_gradients(forward: Callable) -> Callable:
    """``(x, weights, cotangent) -> (result, gradient of x, gradient of weights)``."""

    def forward_backward(x, weights, cotangent):
        result, vjp = jax.vjp(forward, x, weights)
        return result, *vjp(cotangent)

    return forward_backward
