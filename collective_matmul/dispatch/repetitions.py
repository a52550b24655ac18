"""Programs to measure a request in: many repetitions of the request in one executable.

Every repetition has its own weights, as layers have, and starts after the results of the previous
one, so that XLA can neither merge nor overlap them. All results are results of the program, so that
XLA removes none.

Global arrays concatenate the devices' shards along the first dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul.dispatch.contract import COMPUTE_ONLY, Backend, Request

#: The mesh axis of the programs.
AXIS = "tensor"

#: Seconds of work in one call that hide the cost of the call; more would take longer to compile.
_SECONDS_PER_CALL, _REPETITIONS = 0.01, (2, 16)


class Repetitions:
    """A flat request, repeated, on the first `axis_size` of some devices.

    Ops implement `plain_operands` and `execute`; and `prepare_shards` if operands take work that
    is not part of the request.

    Args:
      request: the flat request.
      devices: at least `axis_size` devices.
      seconds: about how long the reference takes.

    Attributes:
      mesh: one axis, `AXIS`.
      repetitions: the number of repetitions in a program.
      bound: what executes the request without its communication; None if nothing does.
      prepares: whether `prepare_shards` does anything.
    """

    bound: Backend | None = None
    prepares: bool = False

    def __init__(self, request: Request, devices: Sequence[Any], seconds: float):
        self.request = request
        self.mesh = jax.make_mesh(
            (request.axis_size,),
            (AXIS,),
            axis_types=(AxisType.Auto,),
            devices=devices[: request.axis_size],
        )
        fewest, most = _REPETITIONS
        self.repetitions = min(max(int(_SECONDS_PER_CALL / seconds), fewest), most)

    def plain_operands(self, implementation: str) -> Any:
        """Global shapes of the operands, by `shards`: a named tuple with a field ``weights``.

        ``weights`` has the operands that each repetition has to itself, one item for each of
        `repetitions`. All programs have the same weights. Whatever is gathered is gathered already
        if `implementation` is `COMPUTE_ONLY`.
        """
        raise NotImplementedError

    def execute(self, backend: Backend, operands: Any, weights: Any) -> tuple[Any, Any]:
        """Executes the request once over `AXIS`, inside `jax.shard_map`.

        Args:
          backend: a backend of the request, or `bound`.
          operands: the device's shards of all operands but the weights.
          weights: those of the repetition's weights.

        Returns:
          Results that the next repetition waits for, and results that it does not wait for.
        """
        raise NotImplementedError

    def prepare_shards(self, operands: Any) -> Any:
        """One device's arguments of a program from its shards of `plain_operands`."""
        return operands

    def program(self, backend: str | Backend) -> Any:
        """A function of the operands that executes all repetitions with a backend."""
        if isinstance(backend, str):
            backend = self._named(backend)
        # Traced once for all repetitions.
        repetition = jax.jit(functools.partial(self.execute, backend))

        def run(operands: Any) -> Any:
            others, results = operands._replace(weights=()), []
            for ws in operands.weights:
                waited_for, more = repetition(others, ws)
                others, waited_for = lax.optimization_barrier((others, waited_for))
                results.append((waited_for, more))
            return results

        return self._on_devices(run)

    def _named(self, name: str) -> Backend:
        if name != COMPUTE_ONLY:
            return self.request.backends[name]
        assert self.bound is not None
        return self.bound

    def operands(self, implementation: str) -> Any:
        """Shapes of a program's arguments. Those of `COMPUTE_ONLY` are gathered already."""
        plain = self.plain_operands(implementation)
        if not self.prepares:
            return plain
        described = jax.eval_shape(self.prepare, plain)
        return jax.tree.map(lambda leaf: self._array(leaf.shape, leaf.dtype), described)

    def prepare(self, operands: Any) -> Any:
        """A program's arguments from `plain_operands`."""
        return self._on_devices(self.prepare_shards)(operands)

    def shards(self, rows: int, columns: int, dtype: Any) -> jax.ShapeDtypeStruct:
        """The global array of a [rows, columns] on every device."""
        return self._array((rows * self.request.axis_size, columns), dtype)

    def _array(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, P(AXIS)))

    def _on_devices(self, fun: Callable) -> Callable:
        return jax.shard_map(
            fun, mesh=self.mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
        )


@functools.cache
def filler(described: jax.ShapeDtypeStruct, deviation: float = 1.0) -> Any:
    """A function that makes a described array from a seed (a uint32), ready to be compiled.

    Values are normally distributed with this standard deviation: zeros and other repeated numbers
    draw less power than the numbers of a real program.

    One program makes one array, and equal arrays share it. A program for many arrays would take XLA
    a second to compile for each.
    """

    def fill(seed: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), described.shape, described.dtype) * deviation

    return jax.jit(fill, out_shardings=described.sharding)
