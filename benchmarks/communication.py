"""What the contenders differ in: how rows come together before a matmul and part after one.

Legend: D devices on the axis, m = M/D rows of a shard, K features, N columns over all devices.

A program is written once, in terms of a state that flows from layer to layer and of two methods:

``all_gather_matmul(state, ws) -> ys``               each w [K, N/D] -> each y [M, N/D]
``matmul_reduce_scatter_add(state, x, w) -> state``  x [M, N/D], w [N/D, K], added to the state

The state is a shard [m, K], but for `NoCommunication`, which keeps all rows beside it.
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

State = Any


class Communication(Protocol):
    """See the module."""

    on_shards: bool
    """Whether the program runs inside `shard_map`; else on global arrays, which XLA partitions."""

    def state(self, shard: jax.Array, whole: jax.Array) -> State:
        """The state to start from: global arrays [M, K], and [D*M, K] with M rows per device."""
        ...

    def all_gather_matmul(self, state: State, ws: Sequence[jax.Array]) -> tuple[jax.Array, ...]: ...

    def matmul_reduce_scatter_add(self, state: State, x: jax.Array, w: jax.Array) -> State: ...


class PlainJax:
    """One collective and one matmul, differentiated by JAX: what a program without us does."""

    on_shards = True

    def state(self, shard, whole):
        return shard

    def all_gather_matmul(self, state, ws):
        gathered = lax.all_gather(state, AXIS, axis=0, tiled=True)
        return tuple(gathered @ w for w in ws)

    def matmul_reduce_scatter_add(self, state, x, w):
        return state + lax.psum_scatter(x @ w, AXIS, scatter_dimension=0, tiled=True)


class CollectiveMatmul:
    """The ops of `collective_matmul`."""

    on_shards = True

    def __init__(self, implementation: str | None):
        self.implementation = implementation

    def state(self, shard, whole):
        return shard

    def all_gather_matmul(self, state, ws):
        return all_gather_matmul(state, tuple(ws), AXIS, implementation=self.implementation)

    def matmul_reduce_scatter_add(self, state, x, w):
        return state + matmul_reduce_scatter(x, w, AXIS, implementation=self.implementation)


class Partitioned:
    """Global arrays and sharding constraints: XLA places the collectives, and may window them."""

    on_shards = False

    def __init__(self, mesh: Mesh):
        self.rows, self.columns = NamedSharding(mesh, ROWS), NamedSharding(mesh, COLUMNS)

    def state(self, shard, whole):
        return shard

    def all_gather_matmul(self, state, ws):
        return tuple(lax.with_sharding_constraint(state @ w, self.columns) for w in ws)

    def matmul_reduce_scatter_add(self, state, x, w):
        return state + lax.with_sharding_constraint(x @ w, self.rows)


class NoCommunication:
    """The ceiling: every matmul and every elementwise pass of the program, nothing communicated.

    The state is (shard [m, K], whole [M, K]). Where rows would be gathered, whole is there already;
    where they would be scattered, the shard takes the first m rows of the product and the product
    itself is the next whole. The gradients do likewise: the cotangent of a whole is the product
    that the next layer's backward made. Each matmul needs the one before it and has all its rows
    used by the one after it, so XLA can neither drop a part, nor merge them, nor run two at once,
    and no array is copied or made for the purpose. The numbers mean nothing.
    """

    on_shards = True

    def state(self, shard, whole):
        return shard, whole

    def all_gather_matmul(self, state, ws):
        gathered = _already_gathered(*state)
        return tuple(gathered @ w for w in ws)

    def matmul_reduce_scatter_add(self, state, x, w):
        part, whole = _split(x @ w)
        return state[0] + part, whole


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
