"""FlashAttention-3 for Hopper GPUs, by an optional package.

Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision",
2024. The package `dew-flash-attn-cu13` (or `-cu12`) has its kernels in a library with XLA's foreign
function interface. The functions of that library are called directly: its Python functions return
no log-sum-exp, and their gradients do not know over which mesh axes a value varies. What is called
here is that of the versions in `_VERSIONS`.

A batch whose sequences have segments is passed as one sequence with the offsets of all segments.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from collective_matmul._compat import vary_over, varying_axes
from collective_matmul.hardware import traced_device
from collective_matmul.jaxprs.scratch import declare_scratch
from collective_matmul.ops.attention.kernel import AttentionKernel, Gradients, Parts
from collective_matmul.ops.attention.request import AttentionRequest
from collective_matmul.ops.attention.segments import Segments

#: The packages, of which one may be installed, their module, and the versions that are known.
PACKAGES = ("dew-flash-attn-cu13", "dew-flash-attn-cu12")
_MODULE, _LIBRARY = "dew_flash_attn", "libdew_flash_attn3.so"
_VERSIONS = ("0.3.6",)
_OLDEST_JAX = (0, 11, 2)
_LARGEST_HEAD = 256
#: Rows of a block of the backward, at the most: its scratch memory has as many more per segment.
_BLOCK = 128
#: Names under which the functions of the library are registered with XLA.
_FORWARD, _FORWARD_OF_SEGMENTS = "dew_flash3_mha_fwd", "dew_flash3_mha_varlen_fwd"
_BACKWARD, _BACKWARD_OF_SEGMENTS = "dew_flash3_mha_bwd", "dew_flash3_mha_varlen_bwd"
_PREFIX = "collective_matmul_"
_DETERMINISTIC = "xla_gpu_deterministic_ops=true"


class FlashAttention3(AttentionKernel):
    """FlashAttention-3. Terms of a query's gradient are added in no fixed order."""

    name = "flash3"
    takes_parts = True

    def unsupported_reason(self, request: AttentionRequest) -> str | None:
        """Allows Hopper GPUs, half precision, and heads of up to 256."""
        device = traced_device()
        if device.platform not in ("gpu", "cuda") or not _is_hopper(device.device_kind):
            return f"it runs on Hopper GPUs, and this is {device.device_kind}"
        if not request.is_half:
            return f"it takes bfloat16 and float16, not {request.dtype.name}"
        if request.head_size > _LARGEST_HEAD:
            return f"it takes heads of up to {_LARGEST_HEAD}, not {request.head_size}"
        if request.scale <= 0:
            return f"it takes positive scales, not {request.scale}"
        if request.differentiated and _DETERMINISTIC in os.environ.get("XLA_FLAGS", ""):
            return f"its gradients are added in no fixed order, and XLA_FLAGS has {_DETERMINISTIC}"
        return None

    def missing_reason(self) -> str | None:
        """See `AttentionKernel`: the package, and a release of JAX that it is for."""
        return missing_reason()

    def forward(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        segments: Segments | None,
        request: AttentionRequest,
    ) -> tuple[jax.Array, jax.Array]:
        """See `AttentionKernel`."""
        q, k, v = (_as_kernels_take_it(x, segments) for x in (query, key, value))
        tokens = q.shape[:-2]  # [B, S], or [B * S] with segments.
        statistics = (q.shape[1], *tokens) if segments is not None else _swapped(q.shape[:3])
        # The last two results are for keys in several parts, which the library does not have.
        types = [(q.shape, q.dtype), (statistics, jnp.float32)]
        types += [((1, 1, 1, 1), jnp.float32), ((1, 1, 1), jnp.float32)]
        name = _FORWARD if segments is None else _FORWARD_OF_SEGMENTS
        offsets = _offsets_of_segments(segments)
        out, log_sum_exp, *_ = _call(name, types, (q, k, v), offsets, request)
        out = out[..., : query.shape[3]].reshape(query.shape)
        return out, _by_sequence(log_sum_exp, query, segments)

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
        operands = (cotangent, query, key, value, out)
        dy, q, k, v, o = (_as_kernels_take_it(x, segments) for x in operands)
        parts = request.batch * (1 if segments is None else segments.most)
        rows = request.batch * request.queries + _BLOCK * (parts + 1)
        scratch = ((request.heads * rows,), jnp.float32)
        types = [(x.shape, x.dtype) for x in (q, k, v)] + [scratch, scratch]
        if segments is not None:  # [B, N, S] -> [N, B * S]
            log_sum_exp = jnp.swapaxes(log_sum_exp, 0, 1).reshape(request.heads, -1)
        name = _BACKWARD if segments is None else _BACKWARD_OF_SEGMENTS
        offsets = _offsets_of_segments(segments)
        found = _call(name, types, (dy, q, k, v, o, log_sum_exp), offsets, request)
        dquery, dkey, dvalue = (
            gradient[..., : x.shape[3]].reshape(x.shape)
            for gradient, x in zip(found, (query, key, value), strict=False)
        )
        return dquery, dkey, dvalue

    def forward_of_parts(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        parts: Parts,
        request: AttentionRequest,
    ) -> tuple[jax.Array, jax.Array]:
        """See `AttentionKernel`."""
        q, k, v = map(_of_size_8, (query, key, value))
        tokens, heads, _ = q.shape
        types = [(q.shape, q.dtype), ((heads, tokens), jnp.float32)]
        types += [((1, 1, 1, 1), jnp.float32), ((1, 1, 1), jnp.float32)]
        offsets = _offsets_of_parts(parts)
        out, log_sum_exp, *_ = _call(_FORWARD_OF_SEGMENTS, types, (q, k, v), offsets, request)
        return out[..., : query.shape[2]], log_sum_exp

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
        """See `AttentionKernel`."""
        dy, q, k, v, o = map(_of_size_8, (cotangent, query, key, value, out))
        rows = len(query) + _BLOCK * (len(parts.query_lengths) + 1)
        scratch = ((request.heads * rows,), jnp.float32)
        types = [(x.shape, x.dtype) for x in (q, k, v)] + [scratch, scratch]
        operands = dy, q, k, v, o, log_sum_exp
        found = _call(_BACKWARD_OF_SEGMENTS, types, operands, _offsets_of_parts(parts), request)
        size = query.shape[2]
        return found[0][..., :size], found[1][..., :size], found[2][..., :size]


@functools.cache
def missing_reason() -> str | None:
    """Why the package cannot be used here, whatever is asked of it; None if it can."""
    if jax.__version_info__ < _OLDEST_JAX:
        oldest = ".".join(map(str, _OLDEST_JAX))
        return f"it needs jax {oldest} or newer, and this is {jax.__version__}"
    found = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    if not found or importlib.util.find_spec(_MODULE) is None:
        return (
            f"it needs the package {PACKAGES[0]}: pip install '.[flash]' in the repository"
            " (flash12 for CUDA 12)"
        )
    known = [name for name, version in found.items() if version in _VERSIONS]
    if not known:
        (name, version), *_ = found.items()
        return f"it needs {name} {' or '.join(_VERSIONS)}, and {version} is installed"
    return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_hopper(device_kind: str) -> bool:
    """Whether a kind of device, which may not be there, has a Hopper chip: H20, H200 too."""
    return any(name in device_kind for name in ("H100", "H20", "H800"))


@functools.cache
def _register() -> None:
    """Registers the functions of the library with XLA.

    The module is not imported: it would load FlashAttention-2 too.
    """
    spec = importlib.util.find_spec(_MODULE)
    assert spec is not None and spec.origin is not None
    library = ctypes.cdll.LoadLibrary(str(Path(spec.origin).with_name(_LIBRARY)))
    for name in (_FORWARD, _FORWARD_OF_SEGMENTS, _BACKWARD, _BACKWARD_OF_SEGMENTS):
        target = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(_PREFIX + name, target, platform="CUDA")


def _call(
    name: str,
    types: list[tuple[tuple[int, ...], Any]],
    operands: tuple[jax.Array, ...],
    offsets: tuple[jax.Array, ...],
    request: AttentionRequest,
) -> list[jax.Array]:
    """The results of a function of the library, typed as varying over the axes of its operands.

    Offsets are those of the queries and keys of each segment, or none.
    """
    if jax.default_backend() == "gpu":  # Else the program is traced, or lowered, and does not run.
        _register()
    operands = (*operands, *offsets)
    axes = frozenset().union(*map(varying_axes, operands))
    attributes: dict[str, Any] = {
        "softmax_scale": np.float64(request.scale),
        "is_causal": request.causal,
        "window_size_left": np.int64(-1 if request.window is None else request.window - 1),
        "window_size_right": np.int64(0 if request.causal else -1),
    }
    if offsets:
        attributes["max_seqlen"] = np.int64(request.queries)
        attributes["max_seqlen_k"] = np.int64(request.keys)
    results = tuple(jax.ShapeDtypeStruct(*each) for each in types)
    call = jax.ffi.ffi_call(_PREFIX + name, results, vmap_method="sequential")
    found = call(*(vary_over(x, axes) for x in operands), **attributes)
    return [vary_over(x, axes) for x in found]


def _offsets_of_segments(segments: Segments | None) -> tuple[jax.Array, ...]:
    return () if segments is None else (segments.offsets, segments.offsets)


def _offsets_of_parts(parts: Parts) -> tuple[jax.Array, ...]:
    """Offsets of all parts, and the end: int32 [P + 1] for queries, and for keys."""

    def offsets(lengths: jax.Array) -> jax.Array:
        ends = jnp.cumsum(lengths, dtype=jnp.int32)
        return jnp.concatenate([jnp.zeros_like(ends[:1]), ends])

    return offsets(parts.query_lengths), offsets(parts.key_lengths)


def _of_size_8(heads: jax.Array) -> jax.Array:
    """[..., H], of which H is a multiple of 8."""
    missing = -heads.shape[-1] % 8
    return jnp.pad(heads, ((0, 0),) * (heads.ndim - 1) + ((0, missing),)) if missing else heads


def _as_kernels_take_it(heads: jax.Array, segments: Segments | None) -> jax.Array:
    """[B, S, N, H], or with segments [B * S, N, H]; H is a multiple of 8."""
    heads = _of_size_8(heads)
    return heads if segments is None else heads.reshape(-1, *heads.shape[2:])


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[B, S, N] -> [B, N, S]."""
    return shape[0], shape[2], shape[1]


def _by_sequence(log_sum_exp: jax.Array, query: jax.Array, segments: Segments | None) -> jax.Array:
    """[B, N, S], or with segments [N, B * S] -> [B, N, S]."""
    if segments is None:
        return log_sum_exp
    return jnp.swapaxes(log_sum_exp.reshape(-1, *query.shape[:2]), 0, 1)


def _scratch_of_backward(equation: JaxprEqn) -> int:
    """Bytes of the float32 sums that a backward allocates.

    They are the gradient of the queries, and those of keys and values that several heads share.
    """
    query, key = (cast(Any, v.aval) for v in equation.invars[1:3])
    shared = query.shape[-2] != key.shape[-2]
    return 4 * (query.size + (2 * key.size if shared else 0))


for _name in (_BACKWARD, _BACKWARD_OF_SEGMENTS):
    declare_scratch(_PREFIX + _name, _scratch_of_backward)
