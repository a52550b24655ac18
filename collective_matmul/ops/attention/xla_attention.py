"""Attention by XLA's matmuls, with all scores in memory: any shape, dtype and mask.

The backward computes the weights again from the log-sum-exp: Dao et al., "FlashAttention: Fast and
Memory-Efficient Exact Attention with IO-Awareness", 2022, appendix B.2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from collective_matmul.ops.attention.kernel import AttentionKernel, Gradients, wide_dtype
from collective_matmul.ops.attention.request import AttentionRequest
from collective_matmul.ops.attention.segments import Segments


class XlaAttention(AttentionKernel):
    """The reference, which executes every request. G is N / K."""

    name = "xla"

    def unsupported_reason(self, request: AttentionRequest) -> str | None:
        """None: it executes every request."""
        del request

    def forward(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        segments: Segments | None,
        request: AttentionRequest,
    ) -> tuple[jax.Array, jax.Array]:
        """See `AttentionKernel`. The weights are rounded to the dtype of the values."""
        return attend_where(_seen(segments, request), query, key, value, request.scale)

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
        """See `AttentionKernel`."""
        seen = _seen(segments, request)
        operands = query, key, value, out, log_sum_exp, cotangent
        return gradients_where(seen, *operands, request.scale)


def attend_where(
    seen: jax.Array | None, query: jax.Array, key: jax.Array, value: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """`AttentionKernel.forward` with a mask.

    Args:
      seen: whether each query attends to each key, bool [B or 1, 1, 1, S, T]; None: all to all.
      query: [B, S, N, H].
      key: [B, T, K, H].
      value: [B, T, K, H].
      scale: what scores are multiplied with.
    """
    scores = _scores(query, key, seen, scale)
    log_sum_exp = jax.nn.logsumexp(scores, axis=-1)
    weights = _weights(scores, log_sum_exp).astype(value.dtype)
    out = jnp.einsum("bkgst,btkh->bskgh", weights, value)
    return out.reshape(query.shape), _joined(log_sum_exp)


def gradients_where(
    seen: jax.Array | None,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    log_sum_exp: jax.Array,
    cotangent: jax.Array,
    scale: float,
) -> Gradients:
    """`AttentionKernel.backward` with a mask. Arguments are those of `attend_where` and of it."""
    wide, dtype = log_sum_exp.dtype, query.dtype
    scores = _scores(query, key, seen, scale)
    weights = _weights(scores, log_sum_exp.reshape(scores.shape[:-1]))
    grouped_cotangent = _grouped(cotangent, key)
    dvalue = jnp.einsum("bkgst,bskgh->btkh", weights.astype(dtype), grouped_cotangent)
    dweights = jnp.einsum(
        "bskgh,btkh->bkgst", grouped_cotangent, value, preferred_element_type=wide
    )
    dot = jnp.sum(cotangent.astype(wide) * out.astype(wide), axis=-1)  # [B, S, N]
    dot = jnp.swapaxes(dot, 1, 2).reshape(scores.shape[:-1])
    dscores = weights * (dweights - dot[..., None])
    dscores = (dscores * jnp.asarray(scale, wide)).astype(dtype)
    dquery = jnp.einsum("bkgst,btkh->bskgh", dscores, key).reshape(query.shape)
    return dquery, jnp.einsum("bkgst,bskgh->btkh", dscores, _grouped(query, key)), dvalue


def _scores(query: jax.Array, key: jax.Array, seen: jax.Array | None, scale: float) -> jax.Array:
    """The scaled scores [B, K, G, S, T]: minus infinity where a token does not attend."""
    wide = wide_dtype(query.dtype)
    scores = jnp.einsum("bskgh,btkh->bkgst", _grouped(query, key), key, preferred_element_type=wide)
    scores *= jnp.asarray(scale, wide)
    return scores if seen is None else jnp.where(seen, scores, -jnp.inf)


def _seen(segments: Segments | None, request: AttentionRequest) -> jax.Array | None:
    """Whether each query attends to each key, [B or 1, 1, 1, S, T]; None: all attend to all."""
    seen = None
    if request.causal:
        rows = jnp.arange(request.queries)[:, None] + (request.keys - request.queries)
        columns = jnp.arange(request.keys)[None]
        seen = columns <= rows
        if request.window is not None:
            seen &= columns > rows - request.window
        seen = seen[None, None, None]
    if segments is not None:
        alike = segments.mask[:, :, None]
        seen = alike if seen is None else seen & alike
    return seen


def _weights(scores: jax.Array, log_sum_exp: jax.Array) -> jax.Array:
    """The softmax of scores; zeros for a query that attends to nothing."""
    finite = jnp.where(jnp.isneginf(log_sum_exp), 0, log_sum_exp)
    return jnp.exp(scores - finite[..., None])


def _grouped(heads: jax.Array, key: jax.Array) -> jax.Array:
    """[B, S, N, H] -> [B, S, K, G, H], for keys [B, T, K, H]."""
    return heads.reshape(*heads.shape[:2], key.shape[2], -1, heads.shape[3])


def _joined(rows: jax.Array) -> jax.Array:
    """[B, K, G, S] -> [B, N, S]."""
    return rows.reshape(rows.shape[0], -1, rows.shape[3])
