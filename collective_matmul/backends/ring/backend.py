"""The rings: a schedule walked with `ppermute`, so that each chunk is multiplied as it arrives.

The technique is Looped CollectiveEinsum: Wang et al., "Overlap Communication with Dependent
Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax import lax

from collective_matmul.backends.base import (
    EinsumBackend,
    GatherResidual,
    Prediction,
    ShardedWeightBackend,
)
from collective_matmul.backends.chunked_array import empty_like, multiply_chunks
from collective_matmul.backends.ring import cost, einsum_walk, weight_gather
from collective_matmul.backends.ring.schedule import Chunk, Pattern
from collective_matmul.backends.ring.walk import Gather, Ring, walk_gather, walk_scatter
from collective_matmul.backends.weight_blocks import ShardedWeights
from collective_matmul.equation import Equation
from collective_matmul.mosaic_gpu.chunk_matmul import Rows
from collective_matmul.peer_access import no_peer_copies_reason
from collective_matmul.site import Site


class RingBackend(EinsumBackend, ShardedWeightBackend):
    """A ring with one pattern of schedule; see `Backend` for shapes."""

    def __init__(self, name: str, pattern: Pattern):
        self.name = name
        self.pattern: Pattern = pattern

    def all_gather_matmul(
        self,
        x: jax.Array,
        ws: Sequence[jax.Array],
        axis_name: str,
        *,
        dimension: int,
        transpose_w: bool = False,
        keep_gathered: bool = False,
    ) -> tuple[tuple[jax.Array, ...], GatherResidual]:
        """Multiplies the shards of x as they arrive."""
        gather = Gather(x, self.pattern, axis_name, dimension)
        whole = {dimension: x.shape[dimension] * gather.devices}
        columns = [w.shape[0 if transpose_w else 1] for w in ws]
        outs = tuple(
            empty_like(x, whole | {x.ndim - 1: n}, w) for n, w in zip(columns, ws, strict=True)
        )

        def multiply(chunk: Chunk, shard: jax.Array, _, outs):
            here = Rows(shard, 0, gather.size(chunk))
            places = [Rows(out, gather.start(chunk), here.size) for out in outs]
            return multiply_chunks(
                [here], [ws], places, dimension=dimension, transpose_w=transpose_w
            )

        outs = walk_gather(gather, multiply, (), outs)
        return outs, gather.gathered() if keep_gathered else None

    def matmul_reduce_scatter(
        self,
        xs: Sequence[jax.Array],
        ws: Sequence[jax.Array],
        axis_name: str,
        *,
        dimension: int,
        transpose_w: bool = False,
        co_gathered: jax.Array | None = None,
    ) -> tuple[jax.Array, GatherResidual]:
        """Sums the chunks while their accumulators travel."""
        rows = xs[0].shape[dimension] // lax.axis_size(axis_name)
        scatter = Ring("scatter", self.pattern, axis_name, dimension, rows)
        gather = self._co_gather(co_gathered, axis_name, dimension)
        columns = ws[0].shape[0 if transpose_w else 1]

        def multiply(chunk: Chunk, xs: Sequence[jax.Array]) -> jax.Array:
            places = [Rows(x, scatter.start(chunk), scatter.size(chunk)) for x in xs]
            like = {dimension: places[0].size, xs[0].ndim - 1: columns}
            out = Rows(empty_like(xs[0], like, *xs[1:], *ws), 0, places[0].size)
            (product,) = multiply_chunks(
                places, [[w] for w in ws], [out], dimension=dimension, transpose_w=transpose_w
            )
            return product

        y = walk_scatter(scatter, gather, multiply, xs)
        return y, None if gather is None else gather.gathered()

    def matmul_all_reduce(
        self, xs: Sequence[jax.Array], ws: Sequence[jax.Array], axis_name: str
    ) -> jax.Array:
        """Reduce-scatters the rows in a ring, then gathers them with one collective.

        That gather has no matmul left to hide under. The number of rows must be a multiple of D.
        """
        # The direct pattern adds D - 1 chunks at the end, which XLA's sum in place never holds.
        ring = RingBackend(self.name, "one_way") if self.pattern == "direct" else self
        rows = [x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in xs]
        y, _ = ring.matmul_reduce_scatter(rows, ws, axis_name, dimension=0)
        y = lax.all_gather(y, axis_name, axis=0, tiled=True, to="invarying")
        return y.reshape(*xs[0].shape[:-1], y.shape[-1])

    def gather_einsum(
        self,
        equation: Equation,
        a: jax.Array,
        b: jax.Array,
        axis_name: str,
        *,
        keep_gathered: bool = False,
    ) -> tuple[jax.Array, GatherResidual]:
        """Contracts the shards of a as they arrive; see `EinsumBackend`."""
        gather = Gather(a, self.pattern, axis_name, equation.a.index(equation.label))
        y = einsum_walk.gather_einsum(equation, b, gather)
        return y, gather.gathered() if keep_gathered else None

    def scatter_einsum(
        self,
        equation: Equation,
        a: jax.Array,
        b: jax.Array,
        axis_name: str,
        *,
        co_gathered: jax.Array | None = None,
    ) -> tuple[jax.Array, GatherResidual]:
        """Sums the chunks while their accumulators travel; see `EinsumBackend`."""
        dimension = equation.y.index(equation.label)
        rows = a.shape[equation.a.index(equation.label)] // lax.axis_size(axis_name)
        scatter = Ring("scatter", self.pattern, axis_name, dimension, rows)
        gather = self._co_gather(co_gathered, axis_name, dimension)
        y = einsum_walk.scatter_einsum(equation, a, b, scatter, gather)
        return y, None if gather is None else gather.gathered()

    def gather_with_shards(
        self, x: jax.Array, weights: ShardedWeights, axis_name: str, *, dimension: int
    ) -> tuple[jax.Array, ...]:
        """Multiplies the first shard of x by the weights as they arrive, the others by all."""
        return weight_gather.gather_matmul(x, weights, self.pattern, axis_name, dimension)

    def gather_with_shards_gradients(
        self,
        x: jax.Array,
        weights: ShardedWeights,
        dys: Sequence[jax.Array],
        axis_name: str,
        *,
        dimension: int,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Both gradients; see `ring.weight_gather`."""
        return weight_gather.gather_matmul_gradients(
            x, weights, dys, self.pattern, axis_name, dimension
        )

    def scatter_with_shards(
        self, x: jax.Array, weights: ShardedWeights, axis_name: str, *, dimension: int
    ) -> jax.Array:
        """Multiplies the first chunk of x by the weights as they arrive, the others by all."""
        return weight_gather.matmul_scatter(x, weights, self.pattern, axis_name, dimension)

    def scatter_with_shards_gradients(
        self,
        x: jax.Array,
        weights: ShardedWeights,
        dy: jax.Array,
        axis_name: str,
        *,
        dimension: int,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Both gradients; see `ring.weight_gather`."""
        return weight_gather.matmul_scatter_gradients(
            x, weights, dy, self.pattern, axis_name, dimension
        )

    def unsupported_reason(self, site: Site) -> str | None:
        """Permutes meet on all devices; and an all-reduce scatters rows, which the axis divides."""
        if site.divergent_axes:
            axes = " and ".join(map(repr, site.divergent_axes))
            return (
                f"devices along {axes} may take different branches or numbers of steps around it,"
                " and a permute waits for all devices of the program"
            )
        if site.op == "matmul_all_reduce" and site.rows % site.axis_size:
            return (
                f"{site.rows} rows are not divisible by axis {site.axis_name!r} of size"
                f" {site.axis_size}"
            )
        return None

    def unprofitable_reason(self, site: Site) -> str | None:
        """Permutes that are not copies between peers go through NCCL, where they hide nothing."""
        axes = [site.axis_name] if site.axis_size > 1 else []
        if site.weight_shards is not None and site.weight_shards.axis_size > 1:
            axes.append(site.weight_shards.axis_name)
        reason = next(filter(None, map(no_peer_copies_reason, axes)), None)
        return None if reason is None else f"would hide nothing: {reason}"

    def predict(self, site: Site) -> Prediction | None:
        """The cost model, which exists for the one-way ring only."""
        return cost.predict(site) if self.pattern == "one_way" else None

    def _co_gather(self, shard: jax.Array | None, axis_name: str, dimension: int) -> Gather | None:
        if shard is None:
            return None
        return Gather(shard, self.pattern, axis_name, dimension, co_gathered=True)


#: The rings by name.
RINGS: dict[str, RingBackend] = {
    "ring": RingBackend("ring", "one_way"),
    "ring_two_way": RingBackend("ring_two_way", "two_way"),
    "ring_direct": RingBackend("ring_direct", "direct"),
}
