"""`prequantize_experts`: experts' weights that are quantized once, for several calls.

Each matrix of an expert is quantized by itself, for the forward and, transposed, for the backward
pass. Those of gate and up are terms of one sum there, so they have scales in common.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from collective_matmul.operands.format import FORMATS, PLAIN, Format
from collective_matmul.operands.grouped import matrix_stacks
from collective_matmul.operands.quantized import Quantized
from collective_matmul.operands.sharded import WeightShards
from collective_matmul.ops.experts import checks
from collective_matmul.ops.experts.stored_weights import ExpertWeights
from collective_matmul.ops.matmul import checks as matmul_checks
from collective_matmul.ops.matmul.prequantize import unread

_NAMES = ("w_gate", "w_up", "w_down")


def prequantize_experts(
    ws: Sequence[jax.Array],
    fp8: str,
    *,
    weight_axis_name: str | None = None,
    weight_dimension: int = 1,
) -> tuple[Quantized, Quantized, Quantized]:
    """Quantizes the weights of experts; `expert_mlp` takes the results in place of them.

    Results and gradients are the same as with arrays. The gradient of a result's `array` is that of
    the weight; a result's `frozen` has no gradient, and none is computed::

        gate, up, down = prequantize_experts((w_gate, w_up, w_down), "rowwise")     once
        y = expert_mlp(x, ids, weights, gate, up, down, axis_name, fp8="rowwise")   several times

    With `weight_axis_name`, ws are shards, inside a `jax.shard_map` over that axis, whose devices
    agree on the scales. The op then takes the same two arguments, and gathers values in 8 bits.
    Shards are quantized in the dtype of x; give the result the array whose gradient you want, which
    may be wider, by ``each.with_array(w)``.

    Args:
      ws: w_gate, w_up [E/D, h, f] and w_down [E/D, f, h], as the op takes them, in the dtype of x;
        or their shards.
      fp8: the recipe, or the name of a registered format, as the op takes it.
      weight_axis_name: a mesh axis that shards the weights, as the op takes it; None: they are
        whole.
      weight_dimension: the dimension of every weight that it shards, 1 or 2.

    Returns:
      A `Quantized` for each.

    Raises:
      ValueError, TypeError: for arguments that do not fit.
      NameError: if no enclosing `shard_map` has such an axis.
    """
    if fp8 is None:
        names = ", ".join(map(repr, FORMATS))
        raise ValueError(f"fp8=None: expected the name of a registered format: {names}")
    matmul_checks.fp8(fp8)
    _check_arrays(ws)
    matmul_checks.quantizable("w_gate", ws[0], fp8)
    axis = checks.other_axis(weight_axis_name, "weight_axis_name", ())
    shards = shards_of_matrices(axis, checks.weight_dimension(weight_dimension))
    return quantized_stacks(ws, FORMATS[fp8], shards, shards)


def quantized_stacks(
    ws: Sequence[jax.Array],
    stored: Format,
    shards: WeightShards | None,
    shards_of_down: WeightShards | None,
) -> tuple[Quantized, Quantized, Quantized]:
    """The weights of experts in a format.

    Args:
      ws: w_gate, w_up and w_down, as `prequantize_experts` takes them.
      stored: the format.
      shards: how an axis shards each matrix of w_gate and of w_up, or None.
      shards_of_down: how one shards those of w_down.
    """
    gate, up, down = (lax.stop_gradient(w) for w in ws)

    def stacks(shards: WeightShards | None, *ws: jax.Array, transposed: bool = False) -> Any:
        return matrix_stacks(stored, ws, transposed=transposed, sharding=shards)

    forward = *stacks(shards, gate), *stacks(shards, up), *stacks(shards_of_down, down)
    together = stacks(shards, gate, up, transposed=True)
    backward = *together, *stacks(shards_of_down, down, transposed=True)

    def quantized(i: int, number: int, count: int, shards: WeightShards | None) -> Quantized:
        return Quantized(
            ws[i],
            forward[i],
            backward[i],
            format=stored,
            number=number,
            count=count,
            shards=shards,
            stacked=True,
        )

    return (
        quantized(0, 0, 2, shards),
        quantized(1, 1, 2, shards),
        quantized(2, 0, 1, shards_of_down),
    )


def _check_arrays(ws: Sequence[Any]) -> None:
    if len(ws) != len(_NAMES):
        raise ValueError(f"ws: {len(ws)} weights; expected w_gate, w_up and w_down")
    for name, w in zip(_NAMES, ws, strict=True):
        if not isinstance(w, jax.Array | np.ndarray):
            raise TypeError(f"{name}: a {type(w).__name__}; expected an array")
        if w.ndim != 3 or w.dtype != ws[0].dtype:
            raise ValueError(
                f"{name}: {w.dtype} {w.shape}, and w_gate is {ws[0].dtype}; expected one dtype, and"
                " [experts, rows, columns]"
            )


def shards_of_matrices(weight_axis: str | None, dimension: int) -> WeightShards | None:
    """How an axis shards each matrix of stacks that it shards along a dimension; None if whole.

    Raises:
      ValueError: if it shards the stacks along the experts.
    """
    if weight_axis is None:
        return None
    if dimension == 0:
        raise ValueError(
            "weight_dimension=0: quantized weights are sharded along 1 or 2, the rows or columns of"
            " each matrix; shard one of these, or pass arrays"
        )
    return WeightShards(weight_axis, lax.axis_size(weight_axis), 1 if dimension == 2 else 0)


def checked_weights(
    ws: ExpertWeights, stored: Format, weight_axis: str | None, dimension: int, x: jax.Array
) -> ExpertWeights:
    """The weights of a call. Matrices are those that were made for it, and arrays of them unread.

    Args:
      ws: the weights.
      stored: the format of the call.
      weight_axis: the axis that shards them, or None.
      dimension: the dimension that it shards.
      x: the tokens.

    Raises:
      ValueError: if weights were quantized otherwise than the call needs them.
    """
    if not any(isinstance(w, Quantized) for w in ws):
        return ws
    places = [(w.number, w.count) if isinstance(w, Quantized) else None for w in ws]
    trained = [isinstance(w, Quantized) and w.array is not None for w in ws]
    if places != [(0, 2), (1, 2), (0, 1)] or len(set(trained)) > 1:
        kinds = [_described(w) for w in ws]
        raise ValueError(
            f"w_gate, w_up and w_down: {', '.join(kinds)}; expected the three results of one call"
            " of prequantize_experts, in this order, all trained or all frozen"
        )
    shards = shards_of_matrices(weight_axis, dimension)
    for name, w in zip(_NAMES, ws, strict=True):
        if w.format != stored:
            raise ValueError(
                f"fp8={None if stored == PLAIN else stored.name!r}: {name} is quantized by"
                f" {w.fp8!r}; expected the same format; pass fp8={w.fp8!r}"
            )
        if w.shards != shards:
            raise ValueError(
                f"{name}: quantized as {w.shards or 'a whole'}, and the op has"
                f" {shards or 'whole weights'}; expected the same; pass weight_axis_name and"
                " weight_dimension to both, prequantize_experts and the op, or to neither"
            )
        if w.forward.product_dtype != x.dtype:
            raise ValueError(
                f"{name}: quantized in {w.forward.product_dtype}, and x is {x.dtype}; expected one"
                " dtype; cast the weights to it and call prequantize_experts again"
            )
    return ExpertWeights(*(_constant(w) for w in ws))


def _described(w: Any) -> str:
    if not isinstance(w, Quantized):
        return "an array"
    return f"{w.number} of {w.count} quantized, {'frozen' if w.array is None else 'trained'}"


def _constant(w: Quantized) -> Quantized:
    """The weight, whose matrices have no gradient, and whose array nothing reads."""
    forward, backward = lax.stop_gradient((w.forward, w.backward))
    array = None if w.array is None else unread(w.array)
    return dataclasses.replace(w, array=array, forward=forward, backward=backward)
