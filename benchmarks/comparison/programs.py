"""Parts that the programs of all benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from benchmarks.comparison.communication import Communication, Rewritten
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
    """The program that calls `fun`, inside `shard_map` where the communication needs that."""
    mesh = jax.tree.leaves(arguments)[0].sharding.mesh
    if communication.has_explicit_axes:
        fun = _with_mesh(fun, mesh)
    if communication.inside_shard_map:
        in_specs = jax.tree.map(lambda leaf: leaf.sharding.spec, arguments)
        fun = jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    if isinstance(communication, Rewritten):
        fun = overlap(fun, fp8=communication.fp8)
    return Program(fun, arguments)


def _with_mesh(fun: Callable, mesh: Mesh) -> Callable:
    """A function that is traced with a mesh, as under `jax.set_mesh`."""

    def traced(*arguments: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return fun(*arguments)

    return traced
