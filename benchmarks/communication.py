"""What the contenders differ in: how rows come together before a matmul and part after one.

Legend: D devices on the axis, m = M/D rows of a shard, K features, N columns over all devices.

A program is written once, in terms of rows and of these methods:

``all_gather_matmul(rows, ws) -> ys``    each w [K, N/D] -> each y [M, N/D]
``matmul_reduce_scatter(x, w) -> rows``  x [M, N/D], w [N/D, K]
``add(rows, rows) -> rows``

Rows are a shard [m, K], but for `NoCommunication`, which has all M rows of it beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

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
        """Rows to start from: of global arrays [M, K], and [D*M, K] with M rows per device."""
        ...

    def result(self, rows: Rows) -> Any:
        """What a program of one op returns of rows, so that it does nothing for others' sake."""
        ...

    def all_gather_matmul(self, rows: Rows, ws: Sequence[jax.Array]) -> tuple[jax.Array, ...]: ...

    def matmul_reduce_scatter(self, x: jax.Array, w: jax.Array) -> Rows: ...

    def add(self, a: Rows, b: Rows) -> Rows: ...


class _Shards:
    """Rows are an array."""

    def rows(self, shard, whole):
        return shard

    def result(self, rows):
        return rows

    def add(self, a, b):
        return a + b


class PlainJax(_Shards):
    """One collective and one matmul, differentiated by JAX: what a program without us does."""

    on_shards = True

    def all_gather_matmul(self, rows, ws):
        gathered = lax.all_gather(rows, AXIS, axis=0, tiled=True)
        return tuple(gathered @ w for w in ws)

    def matmul_reduce_scatter(self, x, w):
        return lax.psum_scatter(x @ w, AXIS, scatter_dimension=0, tiled=True)


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


class NoCommunication:
    """The ceiling: every matmul and every elementwise pass of the program, nothing communicated.

    Rows are (shard [m, K], whole [M, K]). Where they would be gathered, whole is there already;
    where they would be scattered, the shard is the first m rows of the product and the product
    itself is the whole, that the next layer takes. Residuals add up shards alone, as they do with
    communication. The gradients do likewise: the cotangent of a whole is the product that the next
    layer's backward made. Each matmul needs the one before it and has all its rows used by the one
    after it, so XLA can neither drop a part, nor merge them, nor run two at once, and no array is
    copied or made for the purpose. The numbers mean nothing.
    """

    on_shards = True

    def rows(self, shard, whole):
        return shard, whole

    def result(self, rows):
        return rows[1]

    def all_gather_matmul(self, rows, ws):
        gathered = _already_gathered(*rows)
        return tuple(gathered @ w for w in ws)

    def matmul_reduce_scatter(self, x, w):
        return _split(x @ w)

    def add(self, a, b):
        return a[0] + b[0], b[1]


@jax.custom_vjp
def _already_gathered(shard: jax.Array, whole: jax.Array) -> jax.Array:
    del shard
    return whole


_already_gathered.defvjp(
    lambda shard, whole: (whole, None), lambda _, whole: (_first_rows(whole), whole)
)


@jax.custom_vjp
def _split(whole: jax.Array) -> tuple[jax.Array, jax.Array]:
    """This device's rows, and all of them. Of the two cotangents only that of all goes back."""
    return _first_rows(whole), whole


_split.defvjp(lambda whole: (_split(whole), None), lambda _, cotangents: (cotangents[1],))


def _first_rows(whole: jax.Array) -> jax.Array:
    """As many rows as a shard has."""
    return whole[: whole.shape[0] // lax.axis_size(AXIS)]
