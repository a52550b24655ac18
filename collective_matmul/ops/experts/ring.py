"""The rings: tokens travel while those that are here are multiplied, and results go home.

The technique is Looped CollectiveEinsum (Wang et al., ASPLOS 2023) with grouped matmuls. All tokens
go to all devices, whatever the router decides: inside a node that is hardly more than what each
token's experts need, it has static shapes, and no token is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from collective_matmul._compat import axis_index
from collective_matmul.dispatch.branches import no_permutes_reason
from collective_matmul.dispatch.contract import Prediction
from collective_matmul.hardware import rates
from collective_matmul.ops.experts import expert_cost
from collective_matmul.ops.experts.backend import ExpertBackend, Finish, Work
from collective_matmul.ops.experts.request import ExpertRequest
from collective_matmul.ops.experts.routing import Routing
from collective_matmul.schedule.direct_scatter import scattered_sum
from collective_matmul.schedule.round_trip import Visit, visits_of, walk_round_trip
from collective_matmul.schedule.schedules import Pattern, make_schedule
from collective_matmul.schedule.walk import Gather, walk_exchange

#: The gain that a prediction has to exceed. On two H100 the ring was 0.5 to 6 % faster than XLA at
#: all shapes that were measured.
_ERROR = 0.01


class RingExperts(ExpertBackend):
    """A ring in which tokens travel by one pattern of schedule. Results go straight home."""

    copies_between_peers = True

    def __init__(self, name: str, pattern: Pattern):
        self.name = name
        self.pattern: Pattern = pattern

    def pieces(self, request: ExpertRequest) -> Sequence[int]:
        """Several of the last visit, unless they would be too narrow to multiply well."""
        return [visit.pieces for visit in self._visits(request)]

    def _visits(self, request: ExpertRequest) -> Sequence[Visit]:
        pattern = self.pattern if request.tokens > 1 else "one_way"
        schedule = make_schedule("gather", pattern, request.axis_size)
        narrowest = 256 * expert_cost.LAST_PIECES
        splits = request.direction == "forward" and request.width % narrowest == 0
        return visits_of(schedule, request.tokens, expert_cost.LAST_PIECES if splits else 1)

    def routings(self, request: ExpertRequest, routing: Routing) -> tuple[Sequence[Routing], Any]:
        """Every device's, straight from it."""
        devices = request.axis_size
        before = walk_exchange([routing.packed] * devices, request.axis_name)

        def of_visit(visit: Visit) -> Routing:
            rows = before[-visit.chunk.offset % devices]
            return routing.unpacked(rows[visit.start : visit.start + visit.size])

        return [of_visit(visit) for visit in self._visits(request)], None

    def round_trip(
        self,
        request: ExpertRequest,
        tokens: Any,
        residuals: Any,
        work: Work,
        finish: Finish,
        operands: Any,
        carry: Any,
    ) -> tuple[Any, Any]:
        """See `ExpertBackend`."""
        del residuals
        gather = Gather(tokens, self.pattern, request.axis_name, 0)
        return walk_round_trip(gather, self._visits(request), work, finish, operands, carry)

    def gathered(self, shard: jax.Array, axis_name: str, dimension: int) -> jax.Array:
        """Shards straight from their owners, in the order of the devices."""
        devices = lax.axis_size(axis_name)
        if devices == 1:
            return shard
        before = walk_exchange([shard] * devices, axis_name)
        # From this device on; rotated, from the first.
        arrived = [before[-offset % devices] for offset in range(devices)]
        whole = lax.concatenate([*arrived, *arrived[:-1]], dimension)
        size = shard.shape[dimension]
        start = lax.rem(devices - axis_index(axis_name), devices) * size
        return lax.dynamic_slice_in_dim(whole, start, devices * size, dimension)

    def scattered(self, whole: jax.Array, axis_name: str, dimension: int) -> jax.Array:
        """Terms go straight to their owner, which adds them in float32."""
        return scattered_sum(whole, axis_name, dimension, whole.dtype)

    def unsupported_reason(self, request: ExpertRequest) -> str | None:
        """Permutes meet on all devices."""
        return no_permutes_reason(request)

    def predict(self, request: ExpertRequest) -> Prediction | None:
        """The cost model, which exists for the direct pattern only."""
        gpu = rates()
        if gpu is None or self.pattern != "direct" or request.axis_size == 1:
            return None
        return Prediction(expert_cost.ring_seconds(request), _ERROR, gpu.basis)


#: The rings by name.
RINGS: dict[str, RingExperts] = {
    "ring": RingExperts("ring", "one_way"),
    "ring_two_way": RingExperts("ring_two_way", "two_way"),
    "ring_direct": RingExperts("ring_direct", "direct"),
}
