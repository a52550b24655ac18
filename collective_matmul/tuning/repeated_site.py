"""Programs to measure a site in: many repetitions of the site in one executable.

Every repetition has its own weights, as layers have, and starts after the products of the previous
one, so that XLA can neither merge nor overlap them. All results are results of the program, so that
XLA removes none. For a site of a backward pass, the program also computes the weight gradient from
the gathered array. As in a backward pass, the next repetition does not wait for it, and XLA may
overlap it with communication.

A site in 8 bits is measured with operands that are quantized already: every backend needs them
alike.

Local shapes: x [m, K], w [K, N], or [N, K] for a site of a backward pass. Global arrays concatenate
the devices' shards along the first dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul.backends import BACKENDS
from collective_matmul.backends.xla import SequentialBackend, xla_seconds
from collective_matmul.dispatch.contract import Backend, Prediction
from collective_matmul.dispatch.table import COMPUTE_ONLY
from collective_matmul.operands.format import PLAIN
from collective_matmul.operands.multiply import multiplied, weight_gradients
from collective_matmul.site import Site
from collective_matmul.tuning.stack_operands import StackOperands, in_format

_AXIS = "tensor"

#: Seconds of work in one call that hide the cost of the call; more would take longer to compile.
_SECONDS_PER_CALL, _REPETITIONS = 0.01, (2, 16)


class Stack:
    """A flat site, repeated, on the first `axis_size` of some devices."""

    def __init__(self, site: Site, devices: Sequence[Any]):
        self.site = site
        self.mesh = jax.make_mesh(
            (site.axis_size,),
            (_AXIS,),
            axis_types=(AxisType.Auto,),
            devices=devices[: site.axis_size],
        )
        fewest, most = _REPETITIONS
        repetitions = int(_SECONDS_PER_CALL / xla_seconds(site))
        self.repetitions = min(max(repetitions, fewest), most)

    def program(self, backend: str | Backend) -> Any:
        """A function of `StackOperands` that executes all repetitions with a backend."""
        if isinstance(backend, str):
            backend = _ComputeOnly() if backend == COMPUTE_ONLY else BACKENDS[backend]
        # Traced once for all repetitions.
        repetition = jax.jit(functools.partial(_repetition, backend, self.site))

        def run(operands: StackOperands):
            others, results = operands._replace(weights=()), []
            for ws in operands.weights:
                products, gradients = repetition(others, ws)
                others, products = lax.optimization_barrier((others, products))
                results.append((products, gradients))
            return results

        return self._on_devices(run)

    def operands(self, implementation: str) -> StackOperands:
        """Shapes of a program's arguments. Those of `COMPUTE_ONLY` are gathered already."""
        plain = self.plain_operands(implementation)
        if self.site.format is PLAIN:
            return plain
        described = jax.eval_shape(self.quantize, plain)
        return jax.tree.map(lambda leaf: self._array(leaf.shape, leaf.dtype), described)

    def quantize(self, operands: StackOperands) -> StackOperands:
        """A program's arguments from `plain_operands`, for a site in 8 bits."""
        return self._on_devices(functools.partial(in_format, self.site))(operands)

    def plain_operands(self, implementation: str) -> StackOperands:
        """As `operands`, in the site's dtype also if it is multiplied in 8 bits."""
        site = self.site
        gathered = site.axis_size if implementation == COMPUTE_ONLY else 1
        xs = [x for x, _ in site.operands]
        aside = None
        if site.op == "all_gather_matmul":
            (rows, columns), *_ = xs
            xs = [(rows * gathered, columns)]
            if site.keep_gathered:
                aside = (site.product_rows, site.columns)
        if site.co_gathered is not None:
            aside = (site.co_gathered[0] * gathered, site.co_gathered[1])
        ws = [w[::-1] if site.transpose_w else w for _, w in site.operands]
        return StackOperands(
            [self._shards(*x) for x in xs],
            None if aside is None else self._shards(*aside),
            [[self._shards(*w) for w in ws] for _ in range(self.repetitions)],
        )

    def _shards(self, rows: int, columns: int) -> jax.ShapeDtypeStruct:
        return self._array((rows * self.site.axis_size, columns), self.site.dtype)

    def _array(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, P(_AXIS)))

    def _on_devices(self, fun: Callable) -> Callable:
        return jax.shard_map(
            fun, mesh=self.mesh, in_specs=P(_AXIS), out_specs=P(_AXIS), check_vma=False
        )


@functools.cache
def filler(described: jax.ShapeDtypeStruct, scale: float = 1.0) -> Any:
    """A function that makes a described array from a seed (a uint32), ready to be compiled.

    Values are normally distributed with this scale: zeros and other repeated numbers draw less
    power than the numbers of a real program.

    One program makes one array, and equal arrays share it. A program for many arrays would take XLA
    a second to compile for each.
    """

    def fill(seed: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), described.shape, described.dtype) * scale

    return jax.jit(fill, out_shardings=described.sharding)


def _repetition(
    backend: Backend, site: Site, operands: StackOperands, ws: Sequence[Any]
) -> tuple[Any, Sequence[jax.Array]]:
    """The products of a site, and the weight gradients if it is part of a backward pass."""
    # Matrices are never transposed.
    transpose_w = site.transpose_w and site.format is PLAIN
    request = replace(site, axis_name=_AXIS, dimension=0, transpose_w=transpose_w)
    co_gathered = operands.aside if site.co_gathered is not None else None
    xs = operands.xs if site.keep_gathered else [*map(multiplied, operands.xs)]
    products, gathered = backend.execute(request, xs, ws, co_gathered)
    if not site.has_weight_gradient:
        return products, ()
    pairs = [operands.aside], [gathered]
    if site.op != "all_gather_matmul":
        pairs = [gathered], operands.xs
    options = {"shards": site.axis_size, "dimension": 0}
    return products, weight_gradients(site.format, *pairs, site.dtype, **options)


class _ComputeOnly(SequentialBackend):
    """The matmuls of a site without its communication: a bound for every backend.

    Arrays to gather are gathered already, and of a sum each device keeps its own part.
    """

    name = COMPUTE_ONLY

    def all_gather(self, x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
        del axis_name, dimension
        return x

    def reduce_scatter(self, x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
        del axis_name, dimension
        return x

    def all_reduce(self, x: jax.Array, axis_name: str) -> jax.Array:
        del axis_name
        return x

    def unsupported_reason(self, site: Site) -> str | None:
        del site

    def predict(self, site: Site) -> Prediction | None:
        del site
