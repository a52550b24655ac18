"""Programs that a site is measured in: the site again and again in one executable.

Every repetition has weights of its own, as layers have, and starts only when the products of the
one before are there, so that XLA can neither merge nor overlap them. All results are results of the
program, so that none is left out. A site of a backward comes with the weight gradient that its
gathered array is for. As in a backward, the next repetition does not wait for that, and XLA may run
it beside communication.

Local shapes: x [m, K], w [K, N], stored as [N, K] where the site is of a backward. Global arrays
have the devices' shards one after another along the first dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul.backends import BACKENDS
from collective_matmul.backends.arithmetic import add, matmul
from collective_matmul.backends.chunked_array import weight_gradients
from collective_matmul.backends.xla import xla_seconds
from collective_matmul.dispatch.table import COMPUTE_ONLY
from collective_matmul.site import Site

_AXIS = "tensor"

#: So much work in one call hides what the call itself costs; more would take longer to compile.
_SECONDS_PER_CALL, _REPETITIONS = 0.01, (2, 16)


class Operands(NamedTuple):
    """Arguments of a program.

    Attributes:
      xs: the x of every pair of operands; one for all pairs of an all-gather.
      aside: the co_gathered, or for a site that keeps what it gathers the x of the weight gradient.
      weights: for every repetition the w of every pair.
    """

    xs: Sequence[Any]
    aside: Any
    weights: Sequence[Sequence[Any]]


class Stack:
    """A flat site on the first of some devices."""

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

    def program(self, implementation: str) -> Any:
        """What runs all repetitions by an implementation, or by none: a function of `Operands`."""
        way = _ALONE if implementation == COMPUTE_ONLY else BACKENDS[implementation]
        # Traced once for all repetitions.
        repetition = jax.jit(functools.partial(_repetition, way, self.site))

        def run(operands: Operands):
            xs, aside, results = operands.xs, operands.aside, []
            for ws in operands.weights:
                products, gradients = repetition(xs, aside, ws)
                xs, aside, products = lax.optimization_barrier((xs, aside, products))
                results.append((products, gradients))
            return results

        return jax.shard_map(
            run, mesh=self.mesh, in_specs=P(_AXIS), out_specs=P(_AXIS), check_vma=False
        )

    def operands(self, implementation: str) -> Operands:
        """What a program takes, without arrays. The ceiling has gathered already."""
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
        return Operands(
            [self._array(*x) for x in xs],
            None if aside is None else self._array(*aside),
            [[self._array(*w) for w in ws] for _ in range(self.repetitions)],
        )

    def _array(self, rows: int, columns: int) -> jax.ShapeDtypeStruct:
        shape = rows * self.site.axis_size, columns
        sharding = NamedSharding(self.mesh, P(_AXIS))
        return jax.ShapeDtypeStruct(shape, self.site.dtype, sharding=sharding)


@functools.cache
def filler(described: jax.ShapeDtypeStruct, scale: float = 1.0) -> Any:
    """What makes an array as it is described out of a seed, a uint32: to be compiled.

    Normally distributed of this scale. Numbers that repeat, zeros above all, take less power to
    multiply than those of a program do.

    A program for each array, that those alike can share: in one program of many XLA would compile
    every one for itself, a second for each.
    """

    def fill(seed: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), described.shape, described.dtype) * scale

    return jax.jit(fill, out_shardings=described.sharding)


def _repetition(
    way: Any, site: Site, xs: Sequence[jax.Array], aside: jax.Array | None, ws: Sequence[jax.Array]
) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
    """The products of a site, and the weight gradients if it is of a backward."""
    if site.op == "matmul_all_reduce":
        return (way.matmul_all_reduce(xs[0], ws[0], _AXIS),), ()
    arguments = {"dimension": 0, "transpose_w": site.transpose_w}
    if site.op == "all_gather_matmul":
        products, gathered = way.all_gather_matmul(
            xs[0], ws, _AXIS, keep_gathered=site.keep_gathered, **arguments
        )
        operands = aside, [gathered]
    else:
        product, gathered = way.matmul_reduce_scatter(xs, ws, _AXIS, co_gathered=aside, **arguments)
        products, operands = (product,), (gathered, xs)
    gradients = weight_gradients(*operands, dimension=0) if site.has_weight_gradient else ()
    return products, gradients


def _all_gather_matmul_alone(x, ws, axis_name, *, dimension, transpose_w, keep_gathered):
    del axis_name, dimension
    return tuple(matmul(x, w, transpose_w) for w in ws), x if keep_gathered else None


def _matmul_reduce_scatter_alone(xs, ws, axis_name, *, dimension, transpose_w, co_gathered):
    del axis_name, dimension
    return add(*(matmul(x, w, transpose_w) for x, w in zip(xs, ws, strict=True))), co_gathered


#: As an implementation, but nothing is communicated: what is gathered is so already, and what is
#: summed stays this device's part of the sum.
_ALONE = SimpleNamespace(
    all_gather_matmul=_all_gather_matmul_alone,
    matmul_reduce_scatter=_matmul_reduce_scatter_alone,
    matmul_all_reduce=lambda x, w, axis_name: matmul(x, w),
)
