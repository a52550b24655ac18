"""`dot_product_attention` and its gradients, by the kernel that is chosen.

Legend of local shapes: B is batch, S the tokens with a query, T those with a key, N query heads, K
key and value heads, H head size.

With a sink z, a number for each head, the softmax has one more term that belongs to no value
(Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023; learnt, as in
gpt-oss). With the log-sum-exp L and the result O of a kernel::

    L' = log(exp(L) + exp(z))         O' = O exp(L - L')         dz = -sum(exp(z - L') dO' · O')

The gradients of queries, keys and values are those of the kernel's backward, given L' and O'.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul._compat import vary_over, varying_axes
from collective_matmul.ops.attention.argument_checks import (
    check_heads,
    check_masks,
    check_segments,
    check_sinks,
)
from collective_matmul.ops.attention.choice import AttentionDecision, decide, kernel_of
from collective_matmul.ops.attention.kernel import AttentionKernel
from collective_matmul.ops.attention.request import AttentionRequest
from collective_matmul.ops.attention.segments import Segments, segments_of_ids

#: Name of the results of attention and of their log-sum-exp, for policies of `jax.checkpoint`.
ATTENTION_CHECKPOINT_NAME = "collective_matmul_attention"

Implementation = str | Sequence[str] | None


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    segment_ids: jax.Array | Segments | None = None,
    max_segments: int | None = None,
    scale: float | None = None,
    sinks: jax.Array | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Attention of grouped heads: ``softmax(scale * query keyᵀ) value``.

    Query head n attends by key and value head ``n // (N / K)``. Between forward and backward only
    the result and the log-sum-exp of the scores are kept beside the arguments. Both have the
    checkpoint name `ATTENTION_CHECKPOINT_NAME`: under a policy of `jax.checkpoint` that saves it,
    the backward does not attend again.

    Arrays are those of one device, as inside `jax.shard_map`; or global over mesh axes of type
    Explicit, which may shard B, and N and K alike. There is no forward mode (`jax.jvp`).

    Args:
      query: [B, S, N, H].
      key: [B, T, K, H], with K a divisor of N.
      value: [B, T, K, H].
      causal: whether a token attends to those before it and itself alone. The last query is then
        the last token: T - S tokens have a key only.
      window: number of tokens that a token attends to, itself included; None: all. Needs `causal`.
      segment_ids: integers [B, S]: tokens attend to those of their segment alone. Each change of
        the id begins one, also a change to padding. Or `Segments`, which several calls may share.
        None: all are one segment.
      max_segments: for `segment_ids`, at least the number of segments in any sequence. Further ones
        are joined to the last.
      scale: a number that scores are multiplied with; None: H ** -0.5.
      sinks: [N], a score for each head that takes part in the softmax and has no value, or None.
      implementation: None chooses what was measured to be fastest; or "flash3", "cudnn" or "xla",
        or several, of which the first that can is used.

    Returns:
      [B, S, N, H] in the dtype of the query.

    Raises:
      ValueError, TypeError: for arguments that do not fit, or an implementation that cannot
        execute them, before anything is compiled.
    """
    window = check_masks(query, key, causal, window, scale)
    check_heads(query, key, value)
    check_sinks(query, sinks)
    check_segments(query, key, segment_ids, max_segments)
    options = (causal, window, scale, _names(implementation))
    sharding = jax.typeof(query).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        return _attend_locally(query, key, value, segment_ids, max_segments, sinks, options)
    segments = _segments(segment_ids, max_segments)
    return _attend(query, key, value, segments, sinks, *options)


def explain_attention(
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    *,
    causal: bool = True,
    window: int | None = None,
    max_segments: int | None = None,
    implementation: Implementation = None,
    differentiated: bool = True,
) -> AttentionDecision:
    """The kernel that `dot_product_attention` takes, and why.

    The arguments are those of `dot_product_attention`, of which the shapes and dtypes count.

    Args:
      query: [B, S, N, H], local.
      key: [B, T, K, H], local.
      causal: see there.
      window: see there.
      max_segments: see there; None: there are no segments.
      implementation: see there.
      differentiated: whether the gradients are computed too.

    Returns:
      The decision, which prints as one line.
    """
    window = check_masks(query, key, causal, window, None)
    check_heads(query, key, key)
    request = AttentionRequest.of(
        query, key, causal=causal, window=window, scale=None, segments=max_segments
    )
    return decide(replace(request, differentiated=differentiated), _names(implementation))


def _names(implementation: Implementation) -> tuple[str, ...] | None:
    """The names of requested kernels; None: none is requested."""
    if implementation is None:
        return None
    if isinstance(implementation, str):
        return (implementation,)
    if not isinstance(implementation, Sequence):
        raise TypeError(f"implementation={implementation!r}: expected None, a name, or several")
    return tuple(implementation)


def _attend_locally(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ids: jax.Array | Segments | None,
    most: int | None,
    sinks: jax.Array | None,
    options: tuple[Any, ...],
) -> jax.Array:
    """Attention over Explicit mesh axes: each device attends with its own sequences and heads."""
    batch, tokens, heads, size = _entries(query)
    for name, array in (("query", query), ("key", key), ("value", value)):
        if tokens is not None or size is not None or _entries(array) != (batch, None, heads, None):
            raise ValueError(
                f"{name} of type {jax.typeof(array)}: over Explicit axes, expected arrays that are"
                " sharded alike, and along batch and heads only; jax.sharding.reshard them to"
                f" {P(batch, None, heads)}"
            )

    def placed(array: Any, entry: Any) -> jax.Array:
        return jax.sharding.reshard(jnp.asarray(array), P(entry))

    segments = _segments(jax.tree.map(lambda x: placed(x, batch), ids), most)
    sinks = None if sinks is None else placed(sinks, heads)

    def attend(*arrays: Any) -> jax.Array:
        return _attend(*arrays, *options)

    spec = P(batch, None, heads)
    specs = spec, spec, spec, P(batch), P(heads)
    arrays = query, key, value, segments, sinks
    return jax.shard_map(attend, in_specs=specs, out_specs=spec)(*arrays)


def _entries(array: jax.Array) -> tuple[Any, ...]:
    """The Explicit axes that shard each of four dimensions."""
    return (*jax.typeof(array).sharding.spec, None, None, None, None)[:4]


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: Segments | None,
    sinks: jax.Array | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    requested: tuple[str, ...] | None,
) -> jax.Array:
    """Attention of local arrays, which are typed as varying over the same axes."""
    most = None if segments is None else segments.most
    request = AttentionRequest.of(
        query, key, causal=causal, window=window, scale=scale, segments=most
    )
    if request.segments is None:
        segments = None
    decide(request, requested)  # Refuses here, where the call is.
    operands = query, key, value, segments, sinks
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(operands)))
    operands = jax.tree.map(lambda x: vary_over(x, axes), operands)
    return _attention(*operands, request, requested)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: Segments | None,
    sinks: jax.Array | None,
    request: AttentionRequest,
    requested: tuple[str, ...] | None,
) -> jax.Array:
    kernel = kernel_of(decide(request, requested))
    return attention_forward(kernel, query, key, value, segments, sinks, request)[0]


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: Segments | None,
    sinks: jax.Array | None,
    request: AttentionRequest,
    requested: tuple[str, ...] | None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    kernel = _kernel_of_both_passes(request, requested)
    results = attention_forward(kernel, query, key, value, segments, sinks, request)
    out, log_sum_exp = (checkpoint_name(x, ATTENTION_CHECKPOINT_NAME) for x in results)
    return out, (query, key, value, segments, sinks, out, log_sum_exp)


def _backward(
    request: AttentionRequest,
    requested: tuple[str, ...] | None,
    residuals: tuple[Any, ...],
    cotangent: jax.Array,
) -> tuple[Any, ...]:
    kernel = _kernel_of_both_passes(request, requested)
    query, key, value, segments, sinks, out, log_sum_exp = residuals
    *gradients, dsinks = attention_backward(
        kernel, query, key, value, segments, sinks, out, log_sum_exp, cotangent, request
    )
    return *gradients, None, dsinks


_attention.defvjp(_forward, _backward)


def _kernel_of_both_passes(
    request: AttentionRequest, requested: tuple[str, ...] | None
) -> AttentionKernel:
    return kernel_of(decide(replace(request, differentiated=True), requested))


def attention_forward(
    kernel: AttentionKernel,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: Segments | None,
    sinks: jax.Array | None,
    request: AttentionRequest,
) -> tuple[jax.Array, jax.Array]:
    """The result [B, S, N, H] and the log-sum-exp [B, N, S], float32, by a kernel; with sinks."""
    return with_sinks(*kernel.forward(query, key, value, segments, request), sinks)


def with_sinks(
    out: jax.Array, log_sum_exp: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """A result [B, S, N, H] and a log-sum-exp [B, N, S] of all keys, with sinks [N] or None."""
    if sinks is None:
        return out, log_sum_exp
    total = jnp.logaddexp(log_sum_exp, sinks.astype(log_sum_exp.dtype)[None, :, None])
    kept = jnp.swapaxes(jnp.exp(log_sum_exp - total), 1, 2)[..., None]
    return (out.astype(kept.dtype) * kept).astype(out.dtype), total


def attention_backward(
    kernel: AttentionKernel,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: Segments | None,
    sinks: jax.Array | None,
    out: jax.Array,
    log_sum_exp: jax.Array,
    cotangent: jax.Array,
    request: AttentionRequest,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """The gradients of query, key, value and sinks, given what `attention_forward` returned.

    Without sinks, `out` and `log_sum_exp` may be of more keys than these: see `AttentionKernel`.
    """
    gradients = kernel.backward(query, key, value, out, log_sum_exp, cotangent, segments, request)
    return *gradients, sinks_gradient(sinks, out, log_sum_exp, cotangent)


def sinks_gradient(
    sinks: jax.Array | None, out: jax.Array, log_sum_exp: jax.Array, cotangent: jax.Array
) -> jax.Array | None:
    """The gradient of sinks, given what `with_sinks` returned and the gradient of the result."""
    if sinks is None:
        return None
    wide = log_sum_exp.dtype
    dot = jnp.sum(cotangent.astype(wide) * out.astype(wide), axis=-1)  # [B, S, N]
    weight = jnp.exp(sinks.astype(wide)[None, :, None] - log_sum_exp)  # [B, N, S]
    dsinks = -jnp.sum(jnp.swapaxes(weight, 1, 2) * dot, axis=(0, 1))
    return dsinks.astype(sinks.dtype)


def _segments(ids: jax.Array | Segments | None, most: int | None) -> Segments | None:
    if ids is None or isinstance(ids, Segments):
        return ids
    assert most is not None
    return segments_of_ids(ids, most)
