"""`XlaExperts`, the reference: an all-gather of the tokens, and a reduce-scatter of the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from collective_matmul._compat import psum_scatter
from collective_matmul.dispatch.contract import Prediction
from collective_matmul.hardware import rates
from collective_matmul.ops.experts import cost
from collective_matmul.ops.experts.backend import ExpertBackend, Finish, Work
from collective_matmul.ops.experts.request import ExpertRequest
from collective_matmul.ops.experts.routing import Routing


class XlaExperts(ExpertBackend):
    """XLA's collectives, before and after the computation. There is one visit, of all tokens."""

    name = "xla"

    def pieces(self, request: ExpertRequest) -> Sequence[int]:
        """One."""
        del request
        return [1]

    def routings(self, request: ExpertRequest, routing: Routing) -> Sequence[Routing]:
        """Gathers them."""
        return [self._gathered(request, routing)]

    def round_trip(
        self,
        request: ExpertRequest,
        tokens: Any,
        work: Work,
        finish: Finish,
        operands: Any,
        carry: Any,
    ) -> tuple[Any, Any]:
        """See `ExpertBackend`."""
        pieces, state = work(0, self._gathered(request, tokens), operands)
        (result,) = (piece(state) for piece in pieces)
        carry = finish(0, state, operands, carry)
        return jax.tree.map(lambda x: self._sum(request, x), result), carry

    def _gathered(self, request: ExpertRequest, values: Any) -> Any:
        if request.axis_size == 1:
            return values
        gather = lambda x: lax.all_gather(x, request.axis_name, axis=0, tiled=True)  # noqa: E731
        return jax.tree.map(gather, values)

    def _sum(self, request: ExpertRequest, result: jax.Array) -> jax.Array:
        if request.axis_size == 1:
            return result
        return psum_scatter(result, request.axis_name, 0)

    def gathered(self, shard: jax.Array, axis_name: str, dimension: int) -> jax.Array:
        """XLA's all-gather."""
        return lax.all_gather(shard, axis_name, axis=dimension, tiled=True)

    def scattered(self, whole: jax.Array, axis_name: str, dimension: int) -> jax.Array:
        """XLA's reduce-scatter."""
        return psum_scatter(whole, axis_name, dimension)

    def unsupported_reason(self, request: ExpertRequest) -> str | None:
        """None: it executes every request."""
        del request

    def predict(self, request: ExpertRequest) -> Prediction | None:
        """The computation and the collectives, one after the other."""
        gpu = rates()
        if gpu is None:
            return None
        seconds = cost.compute_seconds(request) + request.communication_seconds
        return Prediction(max(seconds, gpu.host_seconds), 0.0, gpu.basis)
