"""The contract between the op and its backends, which bring queries, keys and values together."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax

from collective_matmul.dispatch.contract import Backend
from collective_matmul.ops.attention.context.request import ContextRequest
from collective_matmul.ops.attention.kernel import Gradients


class SequenceShard(NamedTuple):
    """This device's part of a sequence.

    Attributes:
      query: [B, s, N, H].
      key: [B, s, K, H].
      value: [B, s, K, H].
      ids: int32 [B, s], numbers of segments, which do not decrease from a position to the next; or
        None.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    ids: jax.Array | None


class ContextBackend(Backend, Protocol):
    """A way to attend to the keys and values of all devices. D is the number of devices.

    Results mean the same whichever backend computes them, so that the passes of one call may have
    different backends.
    """

    def forward(
        self, request: ContextRequest, operands: SequenceShard
    ) -> tuple[jax.Array, jax.Array]:
        """The weighted sums of values, and the log-sum-exp of scaled scores over all devices' keys.

        Returns:
          [B, s, N, H] in the dtype of the query; and [B, N, s], float32 or wider.
        """
        ...

    def backward(
        self,
        request: ContextRequest,
        operands: SequenceShard,
        out: jax.Array,
        log_sum_exp: jax.Array,
        cotangent: jax.Array,
    ) -> Gradients:
        """The gradients of query, key and value, given what the forward pass returned."""
        ...
