"""`prequantize` and `prescale`: what ops find of a weight that they quantize, found before.

Where the same weights are used again before they change, as by the microbatches of a step, both
matrices of each are made before. Of weights that a second mesh axis shards, these are matrices of
the shards, and each use gathers one of the two, in 8 bits.

Where a weight is quantized by the op that uses it, the largest magnitudes that its scales depend on
can come from the pass that wrote the weight.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, overload

import jax
from jax import lax

from collective_matmul._compat import nan_like
from collective_matmul.operands.format import FORMATS, Format
from collective_matmul.operands.quantized import Quantized, array_of, matrices_of
from collective_matmul.operands.sharded import Sharded, WeightShards
from collective_matmul.ops.matmul import checks


@overload
def prequantize(
    w: jax.Array | Quantized,
    fp8: str,
    *,
    weight_axis_name: str | None = None,
    weight_dimension: int = 0,
) -> Quantized: ...
@overload
def prequantize(
    w: Sequence[jax.Array | Quantized],
    fp8: str,
    *,
    weight_axis_name: str | None = None,
    weight_dimension: int = 0,
) -> tuple[Quantized, ...]: ...
def prequantize(w, fp8, *, weight_axis_name=None, weight_dimension=0):
    """Quantizes the weights of one call of an op, which then takes the result in place of `w`.

    Results and gradients are the same as with `w`. Weights of one call have scales in common, so
    those of `all_gather_matmul` that share a gather are quantized together::

        w = prequantize(w, "rowwise")                            once
        y = all_gather_matmul(x, w, axis_name, fp8="rowwise")    several times

    The gradient of the result's `array` is that of w. To differentiate with respect to w, call
    ``each.with_array(w)`` inside the differentiated function.

    With `weight_axis_name`, w are shards, inside a `jax.shard_map` over that axis, whose devices
    agree on the scales: those of the whole weights. Ops then take the same two arguments. They
    gather the values of a matrix, which are 8 bits. Shards are quantized in the dtype of x too;
    give the result the array whose gradient you want, which may be wider::

        q = prequantize(w.astype(x.dtype), "rowwise", weight_axis_name="fsdp").with_array(w)

    Args:
      w: [K, *N] as the op takes it, in the dtype of x, or a sequence of such; or their shards. They
        may be results of `prescale`.
      fp8: the recipe, or the name of a registered format, as the op takes it.
      weight_axis_name: a mesh axis that shards the weights, as the op takes it; None: they are
        whole.
      weight_dimension: the dimension of every w that it shards, 0 or 1.

    Returns:
      A `Quantized`, or a tuple of them.

    Raises:
      ValueError, TypeError: for arguments that do not fit.
      NameError: if no enclosing `shard_map` has such an axis.
    """
    ws = tuple(w) if isinstance(w, Sequence) else (w,)
    stored, arrays = _checked_format(ws, fp8), tuple(map(array_of, ws))
    sharding = checks.weight_shards(weight_axis_name, weight_dimension)
    operands = [_operand(w, fp8, None) for w in lax.stop_gradient(ws)]
    dtype = arrays[0].dtype
    forward = [matrices_of([w], dtype, False, sharding)[0] for w in operands]
    backward = matrices_of(operands, dtype, True, sharding)
    quantized = tuple(
        Quantized(*each, format=stored, number=number, count=len(ws), shards=sharding)
        for number, each in enumerate(zip(arrays, forward, backward, strict=True))
    )
    return quantized if isinstance(w, Sequence) else quantized[0]


def prescale(w: jax.Array, fp8: str, *, magnitudes: Any = None) -> Quantized:
    """Finds the largest magnitudes of a weight, which an op then quantizes with one pass less.

    The op takes the result in place of `w`; what it computes is the same. Who writes a weight has
    its largest magnitudes from the same pass, as XLA fuses both. Keep them, which tensor-wise are
    one number, for the step that uses the weight::

        kept = prescale(new_w.astype(x.dtype), "tensorwise").magnitudes        in the optimizer
        w = prescale(w.astype(x.dtype), "tensorwise", magnitudes=kept)         in the next step
        y = all_gather_matmul(x, w, axis_name, fp8="tensorwise")

    Ops, and `prequantize`, find what such weights of one call have in common.

    Args:
      w: [K, *N] as the op takes it, in the dtype of x; or a shard of it, which the op takes with
        `weight_axis_name`.
      fp8: the recipe, or the name of a registered format, as the op takes it.
      magnitudes: those of the same values that an earlier call found; None: they are found.

    Returns:
      A `Quantized` without matrices. Its `magnitudes` are None in a format that makes no use of
      them, such as "blockwise".

    Raises:
      ValueError, TypeError: for arguments that do not fit.
    """
    stored = _checked_format((w,), fp8)
    matrix = lax.stop_gradient(w).reshape(w.shape[0], math.prod(w.shape[1:]))
    if magnitudes is None:
        return Quantized(w, None, None, stored, magnitudes=stored.magnitudes(matrix))
    found, expected = map(_shapes, (magnitudes, jax.eval_shape(stored.magnitudes, matrix)))
    if found != expected:
        raise ValueError(
            f"magnitudes: shapes {found} for w {w.shape}; expected {expected}, as {fp8!r} has them;"
            " pass those that prescale found of these values"
        )
    return Quantized(w, None, None, stored, magnitudes=magnitudes)


def _shapes(magnitudes: Any) -> Any:
    """The shapes of a pytree of arrays."""
    return jax.tree.map(jax.numpy.shape, magnitudes)


def _checked_format(ws: Sequence[Any], fp8: str) -> Format:
    """The format of this name, of weights that it can store: arrays, or prescaled in it."""
    if fp8 is None:
        names = ", ".join(map(repr, FORMATS))
        raise ValueError(f"fp8=None: expected the name of a registered format: {names}")
    checks.fp8(fp8)
    _check_format_of(ws, fp8)
    arrays = [w.array if _is_prescaled(w) else w for w in ws]
    checks.weights(arrays)
    checks.quantizable("w", arrays[0], fp8)
    return FORMATS[fp8]


def _is_prescaled(w: Any) -> bool:
    return isinstance(w, Quantized) and w.forward is None


def _check_format_of(ws: Sequence[Any], fp8: str | None) -> None:
    """Raises ValueError unless all that is quantized is so in this format."""
    for w in ws:
        if isinstance(w, Quantized) and w.fp8 != fp8:
            raise ValueError(
                f"fp8={fp8!r}: w is quantized by {w.fp8!r}; expected the same format; pass"
                f" fp8={w.fp8!r}"
            )


def quantize_frozen(w: jax.Array, fp8: str, dtype: Any = None) -> Quantized:
    """Quantizes a weight that is not trained; layers and ops take the result in place of it.

    There is one copy of its values, in 8 bits, which a backward transposes where it needs them.

    Args:
      w: [K, N]; also a global array, whose scales then are those of the whole.
      fp8: the name of the format, as the ops take it.
      dtype: the dtype of products, that of x; None: that of w.

    Returns:
      A `Quantized` without array and without a matrix for the backward.
    """
    stored = FORMATS[fp8]
    (forward,) = stored.matrices([lax.stop_gradient(w)])
    if dtype is not None:
        forward = dataclasses.replace(forward, product_dtype=jax.numpy.dtype(dtype))
    return Quantized(None, forward, None, stored)


def checked_weights(
    ws: Sequence[Any], fp8: str | None, shards: WeightShards | None, x: Any
) -> tuple[Any, ...]:
    """The weights of an op. Matrices are those that were made for it, and arrays of them unread.

    Args:
      ws: the weights of one call.
      fp8: the name of its format.
      shards: how a second axis shards its weights.
      x: its other operand, whose dtype shards have been quantized in.

    Raises:
      ValueError: if weights were quantized otherwise than the op needs them.
    """
    _check_format_of(ws, fp8)
    quantized = [w for w in ws if isinstance(w, Quantized) and not _is_prescaled(w)]
    if not quantized:
        return tuple(ws)
    numbers = [(w.number, w.count) for w in quantized]
    if len(quantized) < len(ws) or numbers != [(i, len(ws)) for i in range(len(ws))]:
        raise ValueError(
            f"w: {len(quantized)} of {len(ws)} weights are quantized, as numbers"
            f" {', '.join(f'{i} of {count}' for i, count in numbers)} of a call of prequantize;"
            " expected all weights of one such call in their order, as they have scales in common;"
            " quantize the weights of this op together"
        )
    for w in quantized:
        if w.shards != shards:
            raise ValueError(
                f"w: quantized as {_described(w.shards)}, and the op has {_described(shards)};"
                " expected the same; pass weight_axis_name and weight_dimension to both,"
                " prequantize and the op, or to neither"
            )
        copied, shape = w.forward, (w.shape[0], math.prod(w.shape[1:]))
        own_dtype = w.dtype if shards is None else getattr(x, "dtype", None)  # Arrays may be wider.
        if (copied.shape, copied.product_dtype) != (shape, own_dtype):
            raise ValueError(
                f"w: {own_dtype} {w.shape}, and its copies are of {copied.product_dtype}"
                f" {copied.shape}; expected copies of this array; call prequantize for it"
            )
    return tuple(w if w.array is None else w.with_array(unread(w.array)) for w in quantized)


def operands_of(ws: Sequence[Any], fp8: str | None, shards: WeightShards | None) -> tuple[Any, ...]:
    """The checked weights [K, *N] of an op as operands [K, N]."""
    return tuple(_operand(w, fp8, shards) for w in ws)


def _operand(w: Any, fp8: str | None, shards: WeightShards | None) -> Any:
    w = w.reshape(w.shape[0], math.prod(w.shape[1:]))
    if isinstance(w, Quantized):
        names = ("forward", "backward", "magnitudes")
        made = {name: lax.stop_gradient(getattr(w, name)) for name in names}
        w = dataclasses.replace(w, **made)
    elif fp8 is not None:
        w = Quantized(w, None, None, FORMATS[fp8])
    return w if shards is None else Sharded(w, shards)


@jax.custom_vjp
def unread(array: jax.Array) -> jax.Array:
    """An array of the same type that is NaN, with the gradient of the array.

    So nothing reads the array of a `Quantized`. What is rematerialized would: a barrier at
    its begin takes all operands of the ops inside, and XLA keeps them in a loop over microbatches.
    """
    return nan_like(array)


unread.defvjp(lambda array: (nan_like(array), None), lambda _, gradient: (gradient,))


def _described(shards: WeightShards | None) -> str:
    return "whole weights" if shards is None else f"shards, {shards}"
