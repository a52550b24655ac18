"""Communication of candidates: the gather before a matmul, and the sum after one.

Legend: D devices on the axis, m = M/D rows of a shard, K features, N columns over all devices.

A program is written once, in terms of sharded rows and of these methods:

``all_gather_matmul(rows, ws) -> ys``         each w [K, N/D] -> each y [M, N/D]
``matmul_reduce_scatter(x, w) -> scattered``  x [M, N/D], w [N/D, K]
``matmul_all_reduce(x, w) -> [M, K]``         x [M, N/D], w [N/D, K]
``add(rows, scattered) -> rows``              the residual
``shard(rows) -> [m, K]``                     the rows as a program returns them

Rows and what was scattered are shards [m, K], except for `NoCommunication`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from benchmarks.comparison import mosaic_example
from benchmarks.internals import RecipeName
from collective_matmul import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter, overlap

#: The name of the mesh axis of every benchmark.
AXIS = "tensor"

ROWS, COLUMNS, REPLICATED = P(AXIS, None), P(None, AXIS), P(None, None)

#: An array or a pair of arrays, or a description of them.
Rows = Any


class Communication(ABC):
    """See the module. By default, rows are a shard.

    Attributes:
      inside_shard_map: whether a program runs inside `shard_map`. Otherwise all arrays are global.
      has_explicit_axes: whether the axes of the mesh are Explicit.
      all_reduce_spec: how the result of `matmul_all_reduce` is sharded.
    """

    inside_shard_map = True
    has_explicit_axes = False
    all_reduce_spec = REPLICATED

    def rows(self, shard: Any, whole: Any) -> Rows:
        """Rows, made of global arrays [M, K], and [D*M, K] with M rows per device."""
        return shard

    def scattered(self, shard: Any, whole: Any) -> Any:
        """The result of a reduce-scatter, or its cotangent, made of such arrays."""
        return shard

    def shard(self, rows: Rows) -> jax.Array:
        return rows

    @abstractmethod
    def all_gather_matmul(self, rows: Rows, ws: Sequence[jax.Array]) -> tuple[jax.Array, ...]: ...

    @abstractmethod
    def matmul_reduce_scatter(self, x: jax.Array, w: jax.Array) -> Any: ...

    @abstractmethod
    def matmul_all_reduce(self, x: jax.Array, w: jax.Array) -> jax.Array: ...

    def add(self, rows: Rows, scattered: Any) -> Rows:
        return rows + scattered

    def overlapped(self, fun: Callable, sites: int) -> Callable:
        """The function to differentiate, which is `fun` or computes the same.

        Args:
          fun: a function that calls the methods above.
          sites: how many gathers and sums over devices it has.
        """
        return fun


class PlainJax(Communication):
    """One collective and one matmul, differentiated by JAX: a program without this library."""

    def all_gather_matmul(self, rows, ws):
        gathered = lax.all_gather(rows, AXIS, axis=0, tiled=True)
        return tuple(gathered @ w for w in ws)

    def matmul_reduce_scatter(self, x, w):
        return lax.psum_scatter(x @ w, AXIS, scatter_dimension=0, tiled=True)

    def matmul_all_reduce(self, x, w):
        return lax.psum(x @ w, AXIS)


class Partitioned(Communication):
    """Sharding constraints on global arrays: XLA's partitioner places the collectives."""

    inside_shard_map = False

    def __init__(self, mesh: Mesh):
        self._mesh = mesh

    def all_gather_matmul(self, rows, ws):
        return tuple(self._constrained(rows @ w, COLUMNS) for w in ws)

    def matmul_reduce_scatter(self, x, w):
        return self._constrained(x @ w, ROWS)

    def matmul_all_reduce(self, x, w):
        return self._constrained(x @ w, REPLICATED)

    def _constrained(self, array: jax.Array, spec: P) -> jax.Array:
        return lax.with_sharding_constraint(array, NamedSharding(self._mesh, spec))


class Rewritten(PlainJax):
    """Programs with plain collectives that `collective_matmul.overlap` rewrites, with its `fp8`."""

    def __init__(self, fp8: RecipeName | None = None):
        self.fp8: RecipeName | None = fp8


class ExplicitAxes(Communication):
    """`jax.jit` over a mesh of Explicit axes: types say how arrays are sharded, without
    `shard_map` and without this library."""

    inside_shard_map = False
    has_explicit_axes = True

    def all_gather_matmul(self, rows, ws):
        gathered = reshard(rows, REPLICATED)
        return tuple(gathered @ w for w in ws)

    def matmul_reduce_scatter(self, x, w):
        return jnp.dot(x, w, out_sharding=ROWS)

    def matmul_all_reduce(self, x, w):
        return jnp.dot(x, w, out_sharding=REPLICATED)


class RewrittenJit(ExplicitAxes):
    """Programs whose differentiated function `collective_matmul.overlap` rewrites."""

    def __init__(self, fp8: RecipeName | None = None):
        self.fp8: RecipeName | None = fp8

    def overlapped(self, fun: Callable, sites: int) -> Callable:
        return overlap(fun, require=sites, fp8=self.fp8)


class CollectiveMatmul(Communication):
    """The ops of `collective_matmul`, with their `implementation` and `fp8`.

    Models attend by the kernel `attention`; None is the library's choice.
    """

    def __init__(
        self,
        implementation: str | None,
        fp8: RecipeName | None = None,
        attention: str | None = None,
    ):
        self.implementation, self.fp8, self.attention = implementation, fp8, attention
        self._options: Any = {"implementation": implementation, "fp8": fp8}

    def all_gather_matmul(self, rows, ws):
        return all_gather_matmul(rows, tuple(ws), AXIS, **self._options)

    def matmul_reduce_scatter(self, x, w):
        return matmul_reduce_scatter(x, w, AXIS, **self._options)

    def matmul_all_reduce(self, x, w):
        return matmul_all_reduce(x, w, AXIS, **self._options)


class MosaicExample(Communication):
    """JAX's example of a fused kernel: one weight, forward, all-gather only."""

    def all_gather_matmul(self, rows, ws):
        if len(ws) > 1:
            raise NotImplementedError(f"JAX's Mosaic example takes one weight, not {len(ws)}")
        return (mosaic_example.all_gather_matmul(rows, ws[0], AXIS),)

    def matmul_reduce_scatter(self, x, w):
        raise NotImplementedError("JAX's Mosaic example has no matmul_reduce_scatter")

    def matmul_all_reduce(self, x, w):
        raise NotImplementedError("JAX's Mosaic example has no matmul_all_reduce")


class NoCommunication(Communication):
    """The compute-only bound: every matmul and elementwise pass of the program, no communication.

    Its numbers mean nothing. Rows are a pair (shard [m, K], whole [M, K]); what was scattered is
    the whole product [M, K]. Where rows would be gathered, the whole is used, which exists from the
    start and never changes. Where rows would be scattered, the first m rows of the product are
    used. Gradients do the same: the cotangent of the whole is what a backward would gather.

    Barriers make each matmul wait for the shard that the one before it contributed to, and make
    every product whole before its rows are taken. So XLA can neither drop a part, nor merge
    matmuls, nor run two at once. Barriers cost nothing, and no array is copied or made for them.
    """

    all_reduce_spec = ROWS

    def rows(self, shard, whole):
        return shard, whole

    def scattered(self, shard, whole):
        return whole

    def shard(self, rows):
        return rows[0]

    def all_gather_matmul(self, rows, ws):
        gathered = _already_gathered(*rows)
        return tuple(gathered @ w for w in ws)

    def matmul_reduce_scatter(self, x, w):
        return x @ w

    def matmul_all_reduce(self, x, w):
        return x @ w

    def add(self, rows, scattered):
        return _add_first_rows(*rows, scattered)


@jax.custom_vjp
def _already_gathered(shard: jax.Array, whole: jax.Array) -> jax.Array:
    return lax.optimization_barrier((shard, whole))[1]


_already_gathered.defvjp(
    lambda shard, whole: (_already_gathered(shard, whole), None),
    lambda _, cotangent: (_first_rows(cotangent), None),
)


@jax.custom_vjp
def _add_first_rows(
    shard: jax.Array, whole: jax.Array, product: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return shard + _first_rows(product), whole


def _add_first_rows_backward(_, cotangents):
    shard, whole = lax.optimization_barrier(cotangents)
    return shard, whole, whole


_add_first_rows.defvjp(lambda *args: (_add_first_rows(*args), None), _add_first_rows_backward)


def _first_rows(product: jax.Array) -> jax.Array:
    """The first rows of a product, as many as a shard has."""
    return lax.optimization_barrier(product)[: product.shape[0] // lax.axis_size(AXIS)]
