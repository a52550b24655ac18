"""What the programs of all benchmarks have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax

from benchmarks.communication import ROWS, Communication, Rewritten, Rows
from benchmarks.operands import RandomArray
from collective_matmul import overlap

Direction = Literal["forward", "forward_backward"]


class Program(NamedTuple):
    """A function and its arguments.

    Attributes:
      fun: a function of global arrays.
      arguments: a pytree of `RandomArray`, or of whatever describes what `make` makes.
      donated: the numbers of the arguments that `fun` may overwrite.
      make: makes the arguments, where they are not random.
    """

    fun: Callable
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    make: Callable[[], Made] | None = None


class Made(Protocol):
    """The arrays that programs run on."""

    def bind(self, compiled: Callable, arguments: tuple[Any, ...]) -> Callable[[], Any]:
        """A function that runs a compiled program of these arguments once."""
        ...


def make_program(
    communication: Communication, fun: Callable, arguments: tuple[Any, ...], out_specs: Any
) -> Program:
    """The program that calls `fun` inside `shard_map`."""
    in_specs = jax.tree.map(lambda leaf: leaf.sharding.spec, arguments)
    mesh = jax.tree.leaves(arguments)[0].sharding.mesh
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

    Forward it maps (x, weights) to the result. Forward and backward it maps (x, weights, cotangent
    of the result) to (result, gradient of x, gradients of weights).

    Args:
      communication: the methods that `forward` calls.
      direction: whether there are gradients.
      forward: (rows, weights) -> rows.
      weights: a pytree.
      x: see `Operands.both`.
      cotangent: likewise.
    """

    def without_gradients(x, weights):
        return communication.shard(forward(x, weights))

    def with_gradients(x, weights, cotangent):
        result, vjp = jax.vjp(forward, x, weights)
        x_gradient, weight_gradients = vjp(cotangent)
        return communication.shard(result), communication.shard(x_gradient), weight_gradients

    arguments = (communication.rows(*x), weights)
    if direction == "forward":
        return make_program(communication, without_gradients, arguments, ROWS)
    weight_specs = jax.tree.map(lambda leaf: leaf.sharding.spec, weights)
    return make_program(
        communication,
        with_gradients,
        (*arguments, communication.rows(*cotangent)),
        (ROWS, ROWS, weight_specs),
    )
