"""Causal attention by the fastest kernel for the device.

Legend of local shapes: B is batch, S sequence, N query heads, K key and value heads, H head size.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul._compat import packed_attention
from models.documents import DOCUMENTS_OF_ONE_PACK, Documents, Pack

#: Blocks times documents of a block are a dimension of the grid of cuDNN's kernels.
_LARGEST_GRID = 2**16 - 1


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: Documents | None = None,
    window: int | None = None,
) -> jax.Array:
    """Grouped-query attention with a causal mask; K divides N.

    Uses cuDNN's kernel where it is supported: on GPUs, in half precision, for head sizes that are
    multiples of 8 up to 128. Uses XLA's matmuls elsewhere. Documents are kept apart by a mask, and
    by cuDNN without one on Hopper and newer GPUs, where only the blocks that are needed are
    computed.

    Arrays are local, or global over mesh axes of type Explicit, which may shard B, N and K.

    Args:
      query: [B, S, N, H].
      key: [B, S, K, H].
      value: [B, S, K, H].
      documents: documents that attend to themselves only; None: a sequence is one document.
      window: number of tokens that a token attends to, itself included; None: all before it.

    Returns:
      [B, S, N, H].
    """
    if window is not None and window >= query.shape[1]:
        window = None
    sharding = jax.typeof(query).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        return _attend_locally(sharding.spec, query, key, value, documents, window)
    return _causal_attention(query, key, value, documents, window)


def _attend_locally(
    spec: P,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: Documents | None,
    window: int | None,
) -> jax.Array:
    """Attention over Explicit mesh axes: each device attends with its own sequences and heads.

    The types of queries, keys and values are sharded as `spec` says, documents as its first entry.
    """

    def attend(
        query: jax.Array, key: jax.Array, value: jax.Array, documents: Documents | None
    ) -> jax.Array:
        return _causal_attention(query, key, value, documents, window)

    specs = spec, spec, spec, P(spec[0])
    return jax.shard_map(attend, in_specs=specs, out_specs=spec)(query, key, value, documents)


def _causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: Documents | None,
    window: int | None,
) -> jax.Array:
    """The same for local arrays."""
    half = query.dtype in (jnp.bfloat16, jnp.float16)
    head_size = query.shape[-1]
    if not half or head_size % 8 or head_size > 128 or not _for_gpus():
        return _attend(query, key, value, documents, window)
    if jax.default_backend() == "gpu":
        return _attend_by_cudnn(query, key, value, documents, window)
    return _with_residuals_of_cudnn(query, key, value, documents, window)


def _for_gpus() -> bool:
    """Whether the trace is for GPUs, present or described by the mesh alone."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() == "gpu" or (device is not None and device.platform == "gpu")


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: Documents | None,
    window: int | None,
) -> jax.Array:
    """Attention by XLA, with all scores in memory."""
    mask = None if documents is None else documents.mask
    return _attend_by("xla", query, key, value, mask, window)


def _attend_by(
    implementation: Literal["xla", "cudnn"],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    window: int | None,
) -> jax.Array:
    before = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        is_causal=True,
        local_window_size=before,
        implementation=implementation,
    )


def _attend_by_cudnn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: Documents | None,
    window: int | None,
) -> jax.Array:
    mask = None
    if documents is not None and documents.packs:
        hopper = float(jax.local_devices()[0].compute_capability) >= 9.0
        if hopper and window is None:
            return _attend_in_packs(query, key, value, documents.packs)
        mask = documents.mask
    return _attend_by("cudnn", query, key, value, mask, window)


def _attend_in_packs(
    query: jax.Array, key: jax.Array, value: jax.Array, packs: tuple[Pack, ...]
) -> jax.Array:
    """Attention of each document, by one call of cuDNN for each pack.

    A call leaves rows of other packs as they are in memory, in its result and in its gradients.
    """
    sequences = query.shape[0]
    if any(pack.starts.size > _LARGEST_GRID for pack in packs):
        if sequences == 1:
            raise ValueError(
                f"a sequence of {query.shape[1]} tokens with more than {DOCUMENTS_OF_ONE_PACK}"
                f" documents: cuDNN's attention takes at most {_LARGEST_GRID} places for documents;"
                " give shorter sequences or do not keep documents apart"
            )
        halves = (slice(0, sequences // 2), slice(sequences // 2, sequences))
        parts = (
            _attend_in_packs(
                query[half], key[half], value[half], tuple(p.of_sequences(half) for p in packs)
            )
            for half in halves
        )
        return jnp.concatenate(list(parts))
    attended = jnp.zeros_like(query)
    for pack in packs:
        members = pack.members[:, :, None, None]
        heads = (query, key, value)
        if len(packs) > 1:
            heads = (jnp.where(members, x, 0) for x in heads)
        blocks = (x.reshape(len(pack.starts), -1, *x.shape[2:]) for x in heads)
        part = packed_attention(*blocks, pack.starts, pack.lengths).reshape(query.shape)
        attended = part if len(packs) == 1 else jnp.where(members, part, attended)
    return attended


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _with_residuals_of_cudnn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: Documents | None,
    window: int | None,
) -> jax.Array:
    """Attention for traces where cuDNN's kernel cannot be lowered, without CUDA.

    Saves as much for the backward as cuDNN's kernel, and each pass is one jitted function, so that
    a dry run counts the right bytes.
    """
    return attended_by_kernel(query, key, value, documents, window)


@functools.partial(jax.jit, static_argnums=4)
def attended_by_kernel(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: Documents | None,
    window: int | None,
) -> jax.Array:
    """Stands for a kernel, which stores nothing but its results."""
    return _attend(query, key, value, documents, window)


@functools.partial(jax.jit, static_argnums=0)
def gradients_by_kernel(
    window: int | None, cotangent: jax.Array, *residuals: Any
) -> tuple[jax.Array, ...]:
    """Stands for the kernel of the backward."""
    query, key, value, documents, *_ = residuals
    _, transpose = jax.vjp(lambda q, k, v: _attend(q, k, v, documents, window), query, key, value)
    return transpose(cotangent)


#: Names of the jitted functions that stand for kernels.
KERNELS = ("attended_by_kernel", "gradients_by_kernel")


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: Documents | None,
    window: int | None,
) -> tuple[jax.Array, tuple]:
    attended: Any = _with_residuals_of_cudnn(query, key, value, documents, window)
    # Stands for the log-sum-exp of the scores, [B, N, S], or of each pack
    # [B * documents of a block, N, S].
    log_sum_exp = jnp.swapaxes(query[..., 0], 1, 2).astype(jnp.float32)
    if documents is not None and documents.packs:
        count = sum(pack.starts.shape[1] for pack in documents.packs)
        log_sum_exp = jnp.repeat(log_sum_exp, count, axis=0)
    return attended, (query, key, value, documents, attended, log_sum_exp)


def _backward(
    window: int | None, residuals: tuple, cotangent: jax.Array
) -> tuple[jax.Array | None, ...]:
    return *gradients_by_kernel(window, cotangent, *residuals), None


_with_residuals_of_cudnn.defvjp(_forward, _backward)
