"""cuDNN's fused attention, by JAX's public function and, for segments, by blocks of them.

JAX differentiates that function by a rule of its own. Its pullback is a pytree, of which one leaf
is the result and the only float32 array of three dimensions is the log-sum-exp. The forward takes
it from there. The backward puts in those that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collective_matmul._compat import vary_over, varying_axes
from collective_matmul.hardware import traced_device
from collective_matmul.ops.attention.cudnn_packs import PackedSegments
from collective_matmul.ops.attention.kernel import AttentionKernel, Gradients
from collective_matmul.ops.attention.request import AttentionRequest
from collective_matmul.ops.attention.segments import Segments, segments_of_ids

#: cuDNN's backward computes NaN for some lengths that are no multiple of this.
_LENGTH_MULTIPLE = 128
_LARGEST_HEAD = 128

#: A function of queries, keys and values.
Attend = Callable[..., jax.Array]


class CudnnAttention(AttentionKernel):
    """cuDNN's kernels. Sequences are padded where their length does not suit it."""

    name = "cudnn"

    def unsupported_reason(self, request: AttentionRequest) -> str | None:
        """GPUs, half precision, heads of up to 128, and as many keys as queries."""
        if traced_device().platform not in ("gpu", "cuda"):
            return f"it runs on NVIDIA GPUs, and this is {traced_device().device_kind}"
        if not request.is_half:
            return f"it takes bfloat16 and float16, not {request.dtype.name}"
        if request.head_size % 8 or request.head_size > _LARGEST_HEAD:
            return (
                f"it takes heads of multiples of 8 up to {_LARGEST_HEAD}, not {request.head_size}"
            )
        if not request.attends_to_itself:
            return f"it takes as many keys as queries, not {request.keys} and {request.queries}"
        return None

    def forward(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        segments: Segments | None,
        request: AttentionRequest,
    ) -> tuple[jax.Array, jax.Array]:
        """See `AttentionKernel`."""
        if not _is_here():
            return _opaque(query, (query, _statistics(query)), query, key, value)
        tokens = request.queries
        query, key, value = (_padded(x, 1) for x in (query, key, value))
        packed, attend = _packed_or_whole(query, _padded_segments(segments, request), request)
        if packed is not None:
            out, log_sum_exp = packed.forward(query, key, value, forward_of)
        else:
            out, log_sum_exp = forward_of(attend, query, key, value)
        return out[:, :tokens], log_sum_exp[:, :, :tokens]

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
        if not _is_here():
            operands = query, key, value, out, log_sum_exp, cotangent
            return _opaque(query, (query, key, value), *operands)
        tokens = request.queries
        query, key, value, out, cotangent = (
            _padded(x, 1) for x in (query, key, value, out, cotangent)
        )
        log_sum_exp = _padded(log_sum_exp, 2)
        packed, attend = _packed_or_whole(query, _padded_segments(segments, request), request)
        operands = query, key, value, out, log_sum_exp, cotangent
        if packed is not None:
            gradients = packed.backward(*operands, backward_of)
        else:
            gradients = backward_of(attend, *operands)
        dquery, dkey, dvalue = (gradient[:, :tokens] for gradient in gradients)
        return dquery, dkey, dvalue


def forward_of(
    attend: Attend, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The result of a function with one call of cuDNN, and the log-sum-exp that it saves."""

    @jax.jit
    def forward(*heads: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, pullback = jax.vjp(attend, *heads)
        leaves = jax.tree.leaves(pullback)
        return out, leaves[_place_of_statistics(leaves)]

    return forward(query, key, value)


def backward_of(
    attend: Attend,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    log_sum_exp: jax.Array,
    cotangent: jax.Array,
) -> Gradients:
    """The gradients of a function with one call of cuDNN, given its result and its log-sum-exp.

    The call of the forward that this traces again is not used: XLA removes it.
    """

    @jax.jit
    def backward(out: jax.Array, log_sum_exp: jax.Array, *heads: jax.Array) -> Gradients:
        own, pullback = jax.vjp(attend, *heads)
        leaves, structure = jax.tree.flatten(pullback)
        # A tracer is its own result: no other leaf is the same object.
        (place,) = (number for number, leaf in enumerate(leaves) if leaf is own)
        leaves[_place_of_statistics(leaves)] = log_sum_exp
        leaves[place] = out
        return jax.tree.unflatten(structure, leaves)(cotangent)

    return backward(out, log_sum_exp, query, key, value)


def _place_of_statistics(leaves: list[Any]) -> int:
    (place,) = (
        number for number, leaf in enumerate(leaves) if leaf.ndim == 3 and leaf.dtype == jnp.float32
    )
    return place


def _packed_or_whole(
    query: jax.Array, segments: Segments | None, request: AttentionRequest
) -> tuple[PackedSegments | None, Attend]:
    """How cuDNN attends within segments: in packs, or by one call that may have a mask.

    Packs need Hopper GPUs, whose kernels compute only the blocks that are needed.
    """
    mask = None
    if segments is not None:
        hopper = float(jax.local_devices()[0].compute_capability) >= 9.0
        if hopper and request.causal and request.window is None and segments.packs:
            return PackedSegments(segments, request.scale), _whole(request, None)
        mask = vary_over(segments.mask, varying_axes(query))
    return None, _whole(request, mask)


def _whole(request: AttentionRequest, mask: jax.Array | None) -> Attend:
    """Attention of whole sequences by one call."""
    before = None if request.window is None else (request.window - 1, 0)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            scale=request.scale,
            is_causal=request.causal,
            local_window_size=before,
            implementation="cudnn",
        )

    return attend


def _padded_segments(segments: Segments | None, request: AttentionRequest) -> Segments | None:
    """The segments of padded sequences, whose padding is a segment of its own.

    Where a token attends to those before it alone, padding needs no segment.
    """
    missing = -request.queries % _LENGTH_MULTIPLE
    if not missing or (segments is None and request.causal):
        return segments
    if segments is None:
        ids, most = jnp.zeros((request.batch, request.queries), jnp.int32), 1
    else:
        ids, most = segments.ids, segments.most
    padding = [(0, 0), (0, missing)]
    return segments_of_ids(jnp.pad(ids, padding, constant_values=most), most + 1)


def _padded(array: jax.Array, dimension: int) -> jax.Array:
    """The array with zeros at the end of a dimension of tokens, so that its size suits cuDNN."""
    padding = [(0, 0)] * array.ndim
    padding[dimension] = (0, -array.shape[dimension] % _LENGTH_MULTIPLE)
    return jnp.pad(array, padding) if any(padding[dimension]) else array


def _is_here() -> bool:
    """Whether the trace can be lowered. JAX traces calls of cuDNN only where there is one."""
    return jax.default_backend() == "gpu"


def _opaque(like: jax.Array, results: Any, *operands: jax.Array) -> Any:
    """Results of a call that stands for cuDNN's in traces for GPUs that are not there.

    It has the operands and results of the kernel, from which a dry run counts bytes.
    """
    axes = frozenset().union(*map(varying_axes, operands))
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results)
    call = jax.ffi.ffi_call("collective_matmul_cudnn_attention", types, vmap_method="sequential")
    return tuple(vary_over(x, axes) for x in call(*(vary_over(x, axes) for x in operands)))


def _statistics(query: jax.Array) -> jax.ShapeDtypeStruct:
    batch, tokens, heads, _ = query.shape
    return jax.ShapeDtypeStruct((batch, heads, tokens), np.float32)
