"""The contract between expert ops and their backends, which bring tokens and experts together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from collective_matmul.dispatch.contract import Backend
from collective_matmul.ops.experts.request import ExpertRequest
from collective_matmul.ops.experts.routing import Routing

#: Makes one piece of a visit's result from the visit's state.
Piece = Callable[[Any], Any]
#: ``work(number of the visit, its tokens, operands)`` returns the pieces, and the state.
Work = Callable[[int, Any, Any], tuple[Sequence[Piece], Any]]
#: ``finish(number of the visit, its state, operands, carry)``.
Finish = Callable[[int, Any, Any, Any], Any]


class ExpertBackend(Backend, Protocol):
    """A way to bring the tokens of all devices to this device's experts, and results home.

    A device sees tokens in visits: sets of tokens of one device, or of several. Both passes of an
    op have the same visits.
    """

    def pieces(self, request: ExpertRequest) -> Sequence[int]:
        """The number of pieces of each visit's result, in the forward pass."""
        ...

    def routings(self, request: ExpertRequest, routing: Routing) -> tuple[Sequence[Routing], Any]:
        """The routings of the tokens of each visit, from this device's.

        Returns:
          The routings of the visits; and arrays of the backend's own, which round trips of both
          passes get: who sends what, if it depends on the routings. Else None.
        """
        ...

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
        """Works on all visits, and sums results over devices.

        Args:
          request: the pass.
          tokens: this device's arrays [T, ...].
          residuals: the second result of `routings`, in the forward pass.
          work: makes the result of a visit: arrays of its tokens, in pieces of the last dimension.
          finish: uses the state of a visit, after the result has left.
          operands: arrays that work and finish use.
          carry: the initial carry of `finish`.

        Returns:
          The sum of the results for this device's tokens, and the last carry.
        """
        ...

    def gathered(self, shard: jax.Array, axis_name: str, dimension: int) -> jax.Array:
        """Weights that a further axis shards, whole."""
        ...

    def scattered(self, whole: jax.Array, axis_name: str, dimension: int) -> jax.Array:
        """The sum over a further axis of gradients of whole weights, in shards."""
        ...
