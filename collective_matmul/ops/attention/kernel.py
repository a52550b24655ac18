"""The contract of an attention kernel: two plain functions, and the requests that it can execute.

Legend of local shapes: B is batch, S the tokens with a query, T those with a key, N query heads, K
key and value heads, H head size. A query head n uses the key and value head n // (N / K).

Nothing here is differentiated: `collective_matmul.ops.attention.attend` has the rule.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from collective_matmul.ops.attention.request import AttentionRequest
from collective_matmul.ops.attention.segments import Segments

#: The gradients of queries, keys and values.
Gradients = tuple[jax.Array, jax.Array, jax.Array]


def wide_dtype(dtype: Any) -> jnp.dtype:
    """The dtype of scores and of their log-sum-exp: at least float32."""
    return jnp.dtype(dtype if jnp.finfo(dtype).bits > 32 else jnp.float32)


class Parts(NamedTuple):
    """Ranges of queries, each with a range of keys; both follow one another without gaps.

    The queries of a part attend to its keys alone. With a causal mask, its last query attends to
    all of them. A part may have keys that no query attends to, or nothing.
    """

    query_lengths: jax.Array
    """int32 [P], which add up to the number of queries."""
    key_lengths: jax.Array
    """int32 [P], which add up to the number of keys."""


class AttentionKernel(Protocol):
    """A way to compute attention and its gradients.

    Attributes:
      name: name for the argument `implementation`.
      takes_parts: whether it has `forward_of_parts` and `backward_of_parts`.
    """

    name: str
    takes_parts: bool = False

    def unsupported_reason(self, request: AttentionRequest) -> str | None:
        """Why it cannot execute a request, as part of a sentence; None if it can.

        The request and the device of the traced program count, which may be another machine's.
        """
        ...

    def missing_reason(self) -> str | None:
        """Names the part of this installation that every request lacks; None if it is whole."""
        return None

    def forward(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        segments: Segments | None,
        request: AttentionRequest,
    ) -> tuple[jax.Array, jax.Array]:
        """The weighted sums of values, and the log-sum-exp of scaled scores.

        Args:
          query: [B, S, N, H].
          key: [B, T, K, H].
          value: [B, T, K, H].
          segments: the segments of both, if the request has some; then S is T.
          request: the request.

        Returns:
          [B, S, N, H] in the dtype of the query; and [B, N, S], float32 or wider. A query that
          attends to nothing has zeros and minus infinity.
        """
        ...

    def backward(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        out: jax.Array,
        log_sum_exp: jax.Array,
        cotangent: jax.Array,
        segments: Segments | None,
        request: AttentionRequest,
    ) -> Gradients:
        """The gradients, given what the forward returned and the cotangent of its sums.

        `out` and `log_sum_exp` may be those of a softmax over more keys than are given here, as in
        attention over a sharded sequence: the gradients are then this softmax's terms of these
        keys.
        """
        ...

    def forward_of_parts(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        parts: Parts,
        request: AttentionRequest,
    ) -> tuple[jax.Array, jax.Array]:
        """`forward` for parts of several lengths that the program computes.

        Args:
          query: [S, N, H].
          key: [T, K, H].
          value: [T, K, H].
          parts: the parts.
          request: its `queries` and `keys` are the largest numbers that a part has; `batch` is 1.

        Returns:
          [S, N, H]; and [N, S].
        """
        del query, key, value, parts
        raise TypeError(f"{self.name} has no attention of parts, for {request}")

    def backward_of_parts(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        out: jax.Array,
        log_sum_exp: jax.Array,
        cotangent: jax.Array,
        parts: Parts,
        request: AttentionRequest,
    ) -> Gradients:
        """`backward` for parts. Keys that no query attends to have gradients of zero."""
        del query, key, value, out, log_sum_exp, cotangent, parts
        raise TypeError(f"{self.name} has no attention of parts, for {request}")
