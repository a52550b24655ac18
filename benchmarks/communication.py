"""What the contenders differ in: how rows come together before a matmul and part after one.

Legend: D devices on the axis, m = M/D rows of a shard, K features, N columns over all devices.

A program is written once, in terms of rows and of these methods:

``all_gather_matmul(rows, ws) -> ys``         each w [K, N/D] -> each y [M, N/D]
``matmul_reduce_scatter(x, w) -> scattered``  x [M, N/D], w [N/D, K]
``add(rows, scattered) -> rows``              the residual
``map(fun, rows) -> rows``                    fun of each row by itself
``shard(rows) -> [m, K]``                     what a program returns of rows

Rows and what was scattered are shards [m, K], but for `NoCommunication`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.peers import mosaic_example
from collective_matmul import all_gather_matmul, matmul_reduce_scatter

#: The name of the mesh axis of every benchmark.
AXIS = "tensor"

ROWS, COLUMNS = P(AXIS, None), P(None, AXIS)

#: An array, or a pair of arrays; or a description of them.
Rows = Any


class Communication(Protocol):
    """See the module."""

    on_shards: bool
    """Whether the program runs inside `shard_map`; else on global arrays, which XLA partitions."""

    def rows(self, shard: Any, whole: Any) -> Rows:
        """Rows, made of global arrays [M, K], and [D*M, K] with M rows per device."""
        ...

    def scattered(self, shard: Any, whole: Any) -> Any:
        """What a reduce-scatter returns, or its cotangent, made of such arrays."""
        ...

    def shard(self, rows: Rows) -> jax.Array: ...

    def all_gather_matmul(self, rows: Rows, ws: Sequence[jax.Array]) -> tuple[jax.Array, ...]: ...

    def matmul_reduce_scatter(self, x: jax.Array, w: jax.Array) -> Any: ...

    def add(self, rows: Rows, scattered: Any) -> Rows: ...

    def map(self, fun: Callable[[jax.Array], jax.Array], rows: Rows) -> Rows: ...


class _Shards:
    """Rows are a shard."""

    def rows(self, shard, whole):
        return shard

    def scattered(self, shard, whole):
        return shard

    def shard(self, rows):
        return rows

    def add(self, rows, scattered):
        return rows + scattered

    def map(self, fun, rows):
        return fun(rows)


class PlainJax(_Shards):
    """One collective and one matmul, differentiated by JAX: what a program without us does."""

    on_shards = True

    def all_gather_matmul(self, rows, ws):
        gathered = lax.all_gather(rows, AXIS, axis=0, tiled=True)
        return tuple(gathered @ w for w in ws)

    def matmul_reduce_scatter(self, x, w):
        return lax.psum_scatter(x @ w, AXIS, scatter_dimension=0, tiled=True)


class Rewritten(PlainJax):
    """The same, in programs that `collective_matmul.overlap` rewrites."""


class CollectiveMatmul(_Shards):
    """The ops of `collective_matmul`."""

    on_shards = True

    def __init__(self, implementation: str | None):
        self.implementation = implementation

    def all_gather_matmul(self, rows, ws):
        return all_gather_matmul(rows, tuple(ws), AXIS, implementation=self.implementation)

    def matmul_reduce_scatter(self, x, w):
        return matmul_reduce_scatter(x, w, AXIS, implementation=self.implementation)


class Partitioned(_Shards):
    """Global arrays and sharding constraints: XLA places the collectives, and may window them."""

    on_shards = False

    def __init__(self, mesh: Mesh):
        self._rows, self._columns = NamedSharding(mesh, ROWS), NamedSharding(mesh, COLUMNS)

    def all_gather_matmul(self, rows, ws):
        return tuple(lax.with_sharding_constraint(rows @ w, self._columns) for w in ws)

    def matmul_reduce_scatter(self, x, w):
        return lax.with_sharding_constraint(x @ w, self._rows)


class MosaicExample(_Shards):
    """JAX's example of a fused kernel: one weight, forward, no reduce-scatter."""

    on_shards = True

    def all_gather_matmul(self, rows, ws):
        if len(ws) > 1:
            raise NotImplementedError(f"JAX's Mosaic example: {len(ws)} weights; it takes one")
        return (mosaic_example.all_gather_matmul(rows, ws[0], AXIS),)

    def matmul_reduce_scatter(self, x, w):
        raise NotImplementedError("JAX's Mosaic example: it has no reduce-scatter")


class NoCommunication:
    """The ceiling: every matmul and every elementwise pass of the program, nothing communicated.

    Rows are (shard [m, K], whole [M, K]), and what was scattered is the whole product [M, K]. Where
    rows would be gathered, the whole is taken, which is there from the start and never changes;
    where they would be scattered, the first m rows of the product are. Gradients do likewise: the
    cotangent of the whole is what a backward would gather. Barriers make each matmul wait for the
    shard that the one before it contributed to, and make every product whole before its rows are
    taken, so that XLA can neither drop a part, nor merge matmuls, nor run two at once; they cost
    nothing, and no array is copied or made for the purpose. The numbers mean nothing.
    """

    on_shards = True

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

    def add(self, rows, scattered):
        return _add_first_rows(*rows, scattered)

    def map(self, fun, rows):
        return fun(rows[0]), rows[1]


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


_add_first_rows.defvjp(
    lambda *operands: (_add_first_rows(*operands), None), _add_first_rows_backward
)


def _first_rows(product: jax.Array) -> jax.Array:
    """As many rows of a product as a shard has."""
    return lax.optimization_barrier(product)[: product.shape[0] // lax.axis_size(AXIS)]
