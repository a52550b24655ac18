"""The rings: a schedule walked with `ppermute`, so that each chunk is multiplied as it arrives.

The technique is Looped CollectiveEinsum: Wang et al., "Overlap Communication with Dependent
Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax import lax

from collective_matmul.backends.arithmetic import Weight
from collective_matmul.backends.base import EinsumBackend, GatherResidual, Prediction
from collective_matmul.backends.ring import cost, einsum_walk, matmul_walk
from collective_matmul.backends.ring.matmul_walk import WholeWeights
from collective_matmul.backends.ring.schedule import Pattern
from collective_matmul.backends.ring.walk import Gather, Ring
from collective_matmul.backends.ring.weight_gather import ShardedWeightRing
from collective_matmul.equation import Equation
from collective_matmul.peer_access import no_peer_copies_reason
from collective_matmul.site import Site


class RingBackend(EinsumBackend, ShardedWeightRing):
    """A ring with one pattern of schedule; see `Backend` for shapes."""

    def __init__(self, name: str, pattern: Pattern):
        self.name = name
        self.pattern = pattern

    def all_gather_matmul(
        self,
        x: jax.Array,
        ws: Sequence[Weight],
        axis_name: str,
        *,
        dimension: int,
        transpose_w: bool = False,
        keep_gathered: bool = False,
        co_gathered: jax.Array | None = None,
    ) -> tuple[tuple[jax.Array, ...], GatherResidual]:
        """Multiplies the shards of x as they arrive."""
        gather = Gather(x, self.pattern, axis_name, dimension)
        beside = self._co_gather(co_gathered, axis_name, dimension)
        weights = WholeWeights(ws, transpose_w=transpose_w)
        ys = matmul_walk.gather_matmul(gather, x, weights, beside)
        if beside is not None:
            return ys, beside.gathered()
        return ys, gather.gathered() if keep_gathered else None

    def matmul_reduce_scatter(
        self,
        xs: Sequence[jax.Array],
        ws: Sequence[Weight],
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
        weights = WholeWeights(ws, transpose_w=transpose_w)
        y = matmul_walk.matmul_scatter(scatter, gather, xs, weights)
        return y, None if gather is None else gather.gathered()

    def matmul_all_reduce(
        self, xs: Sequence[jax.Array], ws: Sequence[Weight], axis_name: str
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

    def rows_of_matmul(self, site: Site) -> int:
        """The rows of a chunk."""
        return site.chunk_rows

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
