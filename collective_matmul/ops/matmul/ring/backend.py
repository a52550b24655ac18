"""The rings: a schedule walked with `ppermute`, so that each chunk is multiplied as it arrives.

The technique is Looped CollectiveEinsum: Wang et al., "Overlap Communication with Dependent
Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax

from collective_matmul.dispatch.branches import no_permutes_reason
from collective_matmul.dispatch.contract import Prediction
from collective_matmul.operands.chunked import Gathered
from collective_matmul.ops.matmul.backend import MatmulBackend
from collective_matmul.ops.matmul.request import Site
from collective_matmul.ops.matmul.ring import cost, einsum_walk, matmul_walk, weight_gather
from collective_matmul.schedule.schedules import Pattern
from collective_matmul.schedule.walk import Gather, Ring


class RingBackend(MatmulBackend):
    """A ring with one pattern of schedule; see `MatmulBackend` for shapes.

    Weights that a second axis shards always come straight from their owners.
    """

    executes_einsums = True
    gathers_weights = True
    copies_between_peers = True
    sends_columns_beside = True

    def __init__(self, name: str, pattern: Pattern):
        self.name = name
        self.pattern: Pattern = pattern

    def all_gather_matmul(
        self, request: Site, x: Any, ws: Sequence[Any]
    ) -> tuple[tuple[jax.Array, ...], Gathered]:
        """Multiplies the shards of x as they arrive."""
        gather = self._gather(request, x)
        weights = weight_gather.weights_of_walk(ws, transpose_w=request.transpose_w)
        ys = matmul_walk.gather_matmul(gather, x, weights)
        return ys, gather.gathered() if request.keep_gathered else None

    def matmul_reduce_scatter(
        self, request: Site, xs: Sequence[Any], ws: Sequence[Any], co_gathered: Any = None
    ) -> tuple[jax.Array, Gathered]:
        """Sums the chunks while their accumulators travel."""
        rows = xs[0].shape[request.shard_dimension] // lax.axis_size(request.axis_name)
        scatter = Ring("scatter", self.pattern, request.axis_name, request.shard_dimension, rows)
        gather = self._co_gather(request, co_gathered)
        weights = weight_gather.weights_of_walk(ws, transpose_w=request.transpose_w)
        y = matmul_walk.matmul_scatter(scatter, gather, xs, weights)
        return y, None if gather is None else gather.gathered()

    def matmul_all_reduce(self, request: Site, xs: Sequence[Any], ws: Sequence[Any]) -> jax.Array:
        """Reduce-scatters the rows in a ring, then gathers them with one collective.

        That gather has no matmul left to hide under. The number of rows must be a multiple of D.
        """
        # The direct pattern adds D - 1 chunks at the end, which XLA's sum in place never holds.
        ring = RingBackend(self.name, "one_way") if self.pattern == "direct" else self
        shape = xs[0].shape
        rows = [jax.tree.map(_in_one_dimension, x) for x in xs]
        y, _ = ring.matmul_reduce_scatter(replace(request, dimension=0), rows, ws)
        y = lax.all_gather(y, request.axis_name, axis=0, tiled=True, to="invarying")
        return y.reshape(*shape[:-1], y.shape[-1])

    def gather_einsum(self, request: Site, a: jax.Array, b: jax.Array) -> tuple[Any, Gathered]:
        """Contracts the shards of a as they arrive."""
        equation = request.labels
        gather = Gather(a, self.pattern, request.axis_name, equation.a.index(equation.label))
        y = einsum_walk.gather_einsum(equation, b, gather)
        return y, gather.gathered() if request.keep_gathered else None

    def scatter_einsum(
        self, request: Site, a: jax.Array, b: jax.Array, co_gathered: Any = None
    ) -> tuple[Any, Gathered]:
        """Sums the chunks while their accumulators travel."""
        equation = request.labels
        request = replace(request, dimension=equation.y.index(equation.label))
        rows = a.shape[equation.a.index(equation.label)] // lax.axis_size(request.axis_name)
        scatter = Ring("scatter", self.pattern, request.axis_name, request.shard_dimension, rows)
        gather = self._co_gather(request, co_gathered)
        y = einsum_walk.scatter_einsum(equation, a, b, scatter, gather)
        return y, None if gather is None else gather.gathered()

    def weight_gradients(
        self,
        request: Site,
        dxs: Any,
        ws: Sequence[Any],
        xs: Sequence[Any],
        ys: Sequence[Any],
        scatter: Callable[[Any, jax.Array], jax.Array],
    ) -> tuple[Any, tuple[jax.Array, ...]]:
        """Sends the terms of gradients to the owners of weights that the loop gathered."""
        if request.weight_shards is None:
            return super().weight_gradients(request, dxs, ws, xs, ys, scatter)
        # Else products for the weight gradients could begin before dxs are there.
        dxs, xs, ys = lax.optimization_barrier((dxs, tuple(xs), tuple(ys)))
        dws, _ = weight_gather.scatter_weight_gradients(ws, xs[0], ys, request.shard_dimension)
        return lax.optimization_barrier((dxs, dws))

    def gathers_under_weight_gradients(self, request: Site) -> bool:
        """Without a ring, weights have no other product under which they could travel."""
        return request.weight_shards is not None and request.axis_size == 1

    def weight_gradients_first(
        self, request: Site, ws: Sequence[Any], xs: Sequence[Any], ys: Sequence[Any]
    ) -> tuple[tuple[jax.Array, ...], Sequence[Any], Sequence[Any]]:
        """Gathers the weights while it contracts their gradients."""
        dws, arrived = weight_gather.scatter_weight_gradients(
            ws, xs[0], ys, request.shard_dimension, gathers_as=request.dtype
        )
        dws, ys = lax.optimization_barrier((dws, tuple(ys)))
        return dws, arrived, ys

    def unsupported_reason(self, site: Site) -> str | None:
        """Permutes meet on all devices; and an all-reduce scatters rows, which the axis divides."""
        if reason := no_permutes_reason(site):
            return reason
        if site.op == "matmul_all_reduce" and site.rows % site.axis_size:
            return (
                f"{site.rows} rows are not divisible by axis {site.axis_name!r} of size"
                f" {site.axis_size}"
            )
        return None

    def rows_of_matmul(self, site: Site) -> int:
        """The rows of a chunk."""
        return site.chunk_rows

    def predict(self, site: Site) -> Prediction | None:
        """The cost model, which exists for the one-way ring only."""
        return cost.predict(site) if self.pattern == "one_way" else None

    def _gather(self, request: Site, shard: Any, *, co_gathered: bool = False) -> Gather:
        axis_name, dimension = request.axis_name, request.shard_dimension
        return Gather(shard, self.pattern, axis_name, dimension, co_gathered=co_gathered)

    def _co_gather(self, request: Site, shard: Any) -> Gather | None:
        return None if shard is None else self._gather(request, shard, co_gathered=True)


def _in_one_dimension(rows: jax.Array) -> jax.Array:
    return rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])


#: The rings by name.
RINGS: dict[str, RingBackend] = {
    "ring": RingBackend("ring", "one_way"),
    "ring_two_way": RingBackend("ring_two_way", "two_way"),
    "ring_direct": RingBackend("ring_direct", "direct"),
}
