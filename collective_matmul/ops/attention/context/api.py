"""`context_attention`: attention over a sequence that a mesh axis divides.

Keys and values travel, queries stay. With grouped heads, keys and values are N / K times smaller
than queries; they travel as they are, and are not repeated.

Bytes that each of D devices sends, for B sequences of s tokens per device, K key and value heads of
size H and numbers of b bytes: forward 2 (D - 1) B s K H b; backward twice that, since keys and
values are gathered again and their gradients come home.

Gradients. With P = exp(scale q kᵀ - L) for the log-sum-exp L of all keys, and dy the gradient of
the result y, a device's queries contribute to each chunk of keys and values::

    dv = Pᵀ dy          dS = P * (dy vᵀ - sum(dy * y))         dk = scale dSᵀ q
    dq = scale dS k, summed over all chunks

So a device needs L, y and dy of its own tokens alone, and sends dk and dv home, where they are
added. Dao et al., "FlashAttention", 2022; for sequences over devices, Liu et al., "Ring Attention
with Blockwise Transformers for Near-Infinite Context", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collective_matmul.dispatch.branches import divergent_axes
from collective_matmul.operands.varying import pvary_all
from collective_matmul.ops.attention.argument_checks import check_sinks
from collective_matmul.ops.attention.context import checks
from collective_matmul.ops.attention.context.backend import SequenceShard
from collective_matmul.ops.attention.context.backends import BACKENDS
from collective_matmul.ops.attention.context.gradients import attention_over_devices
from collective_matmul.ops.attention.context.layout import Layout
from collective_matmul.ops.attention.context.request import ContextRequest
from collective_matmul.ops.experts.checks import axis_names
from collective_matmul.source_location import calling_location
from collective_matmul.transport import transport_over


def context_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    axis_name: str | tuple[str, ...],
    *,
    causal: bool = True,
    layout: Layout = "zigzag",
    segment_ids: jax.Array | None = None,
    max_segments: int | None = None,
    window: int | None = None,
    scale: float | None = None,
    sinks: jax.Array | None = None,
    implementation: str | Sequence[str] | None = None,
    attention_implementation: str | Sequence[str] | None = None,
) -> jax.Array:
    """Attention of this device's tokens to those of all devices along a mesh axis.

    Call it inside `jax.shard_map`, with the device's part of every sequence. Query head n attends
    by key and value head ``n // (N / K)``. Between forward and backward only the result and the
    log-sum-exp of the scores are kept beside the arguments, and nothing that was gathered. Both
    have the checkpoint name `ATTENTION_CHECKPOINT_NAME`: under a policy of `jax.checkpoint` that
    saves it, the backward does not attend again. There is no forward mode (`jax.jvp`).

    Gradients of keys and values come home from all devices, and are added there in a fixed order
    and in at least float32, from terms in k's dtype.

    Args:
      q: [B, s, N, H], the queries of this device's tokens.
      k: [B, s, K, H], with K a divisor of N.
      v: [B, s, K, H].
      axis_name: the mesh axis whose D devices have one part of each sequence, or several axes in
        the order of the mesh, or ``()``.
      causal: whether a token attends to those before it and itself alone.
      layout: which part a device has. "zigzag": device d has chunks d and 2 D - 1 - d of 2 D, as
        `zigzag_order` arranges them, which balances causal attention. "contiguous": device d has
        part d of D.
      segment_ids: integers [B, s], numbers of this device's tokens' segments, such as documents:
        tokens attend to those of their segment alone. In the order of positions over the whole
        sequence, the numbers must not decrease. None: all are one segment.
      max_segments: for `segment_ids`, at least the number of segments in any whole sequence.
      window: number of tokens that a token attends to, itself included; None: all. Needs `causal`.
      scale: a number that scores are multiplied with; None: H ** -0.5.
      sinks: [N], a score for each head that takes part in the softmax and has no value, or None.
        They do not travel.
      implementation: None chooses per shape; or the name of a backend, or several, of which the
        first that can is used: see `collective_matmul.ops.attention.context.backends`.
      attention_implementation: likewise, what attends on each device: "flash3", "cudnn" or "xla".

    Returns:
      [B, s, N, H], in q's dtype.

    Raises:
      ValueError, TypeError: for arguments that do not fit, or an implementation that cannot
        execute them, before anything is compiled.
      NameError: if an axis is not one of an enclosing `shard_map`.
    """
    names = checks.mesh_axes(axis_names(axis_name))
    devices = int(np.prod([lax.axis_size(name) for name in names], dtype=np.int64))
    checks.arrays(q=q, k=k, v=v)
    checks.shapes(q, k, v, segment_ids, max_segments)
    check_sinks(q, sinks)
    if not q.size:
        return jnp.zeros_like(q)
    window = checks.masks(q, k, causal, window, scale)
    batch, tokens, heads, head_size = q.shape
    # One segment is the whole sequence.
    segments = None if max_segments == 1 else max_segments
    request = ContextRequest(
        batch=batch,
        tokens=tokens,
        heads=heads,
        key_value_heads=k.shape[2],
        head_size=head_size,
        dtype=np.dtype(q.dtype),
        axis_name=names,
        axis_size=devices,
        layout=checks.layout(layout, tokens, devices),
        causal=bool(causal),
        window=None if window is not None and window >= tokens * devices else window,
        segments=segments,
        kernels=checks.kernels(attention_implementation),
        scale=head_size**-0.5 if scale is None else float(scale),
        divergent_axes=divergent_axes(*names),
        source=calling_location(),
        transport=transport_over(names),
    )
    ids = None if segments is None or segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
    operands = SequenceShard(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), ids)
    operands, sinks = pvary_all(names, (operands, sinks))
    return attention_over_devices(operands, sinks, request, BACKENDS.requested(implementation))
