"""What the programs of all benchmarks have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.arrays import RandomArray
from benchmarks.communication import ROWS, Communication, Rewritten, Rows
from collective_matmul import overlap

Direction = Literal["forward", "forward_backward"]


class Program(NamedTuple):
    """A function, and its arguments.

    Attributes:
      fun: of global arrays.
      arguments: a pytree of `RandomArray`, or of whatever describes what `make` makes.
      donated: the numbers of the arguments that `fun` may overwrite.
      make: makes the arguments, where they are not random.
    """

    fun: Callable
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    make: Callable[[], Made] | None = None


class Made(Protocol):
    """What was made for programs to run on."""

    def bind(self, compiled: Callable, arguments: tuple[Any, ...]) -> Callable[[], Any]:
        """What runs a compiled program of these arguments once."""
        ...


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

    def both(self, rows: int, columns: int, seed: int = 0) -> tuple[RandomArray, RandomArray]:
        """Global [rows, columns], sharded, and the same with all rows on every device."""
        devices = self.mesh.devices.size
        return (
            self.activations(ROWS, rows, columns, seed),
            self.activations(ROWS, devices * rows, columns, seed),
        )

    def _array(self, spec: P, shape: tuple[int, int], scale: float, seed: int) -> RandomArray:
        return RandomArray(shape, self.dtype, NamedSharding(self.mesh, spec), scale, seed)


def place(
    communication: Communication, fun: Callable, arguments: tuple[Any, ...], out_specs: Any
) -> Program:
    """The program of a function of the arguments, local where the communication wants that."""
    if communication.on_shards:
        leaves = jax.tree.leaves(arguments)
        in_specs = jax.tree.map(lambda leaf: leaf.sharding.spec, arguments)
        mesh = leaves[0].sharding.mesh
        fun = jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    if isinstance(communication, Rewritten):
        fun = overlap(fun)
    return Program(fun, arguments)


def layers_program(
    communication: Communication,
    direction: Direction,
    forward: Callable[[Rows, Any], Rows],
    weights: Any,
    x: tuple[RandomArray, RandomArray],
    cotangent: tuple[RandomArray, RandomArray],
) -> Program:
    """Layers that map rows to rows.

    Forward it maps (x, weights) to the result; forward and backward it maps (x, weights, cotangent
    of the result) to (result, gradient of x, gradients of weights).

    Args:
      communication: in its terms `forward` is written.
      direction: whether there are gradients.
      forward: (rows, weights) -> rows.
      weights: a pytree.
      x: see `Operands.both`.
      cotangent: likewise.
    """

    def result_alone(x, weights):
        return communication.shard(forward(x, weights))

    def with_gradients(x, weights, cotangent):
        result, vjp = jax.vjp(forward, x, weights)
        x_gradient, weight_gradients = vjp(cotangent)
        return communication.shard(result), communication.shard(x_gradient), weight_gradients

    arguments = (communication.rows(*x), weights)
    if direction == "forward":
        return place(communication, result_alone, arguments, ROWS)
    weight_specs = jax.tree.map(lambda leaf: leaf.sharding.spec, weights)
    return place(
        communication,
        with_gradients,
        (*arguments, communication.rows(*cotangent)),
        (ROWS, ROWS, weight_specs),
    )
