"""The ops with weights that have no gradient, and columns that travel in their collective.

Local shapes: D devices are on the axis, M = D m. With W whole on a device or this device's part,
and e a few columns, as those of an adapter::

    gather    Y [M, N] = all_gather(x) W           E [M, r] = all_gather(e)        one loop
    backward  dx [m, K] = reduce_scatter(dY Wᵀ)    de [m, r] = reduce_scatter(dE)  one loop

    scatter   y [m, N] = reduce_scatter(x W)       s [m, r] = reduce_scatter(e)    one loop
    backward  dx [M, k] = all_gather(dy) Wᵀ        de [M, r] = all_gather(ds)      one loop

Each is the backward of the other, and neither keeps anything of x: no weight gradient contracts it,
so nothing is gathered again for one. What is stored between the passes are the weights.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from collective_matmul._compat import psum, tracks_varying_axes, vary_over, varying_axes
from collective_matmul.operands.beside import RowsBeside, WeightsBeside, columns_beside
from collective_matmul.operands.multiply import matmul, multiplied
from collective_matmul.operands.quantized import Quantized, format_of, prepared
from collective_matmul.operands.scaled.scaling import as_row
from collective_matmul.operands.sharded import stored, whole
from collective_matmul.ops.matmul.call import Call
from collective_matmul.ops.matmul.reverse_mode import ReverseMode

#: Arrays [..., r] that travel beside an operand; possibly none.
Columns = tuple[jax.Array, ...]


def _weights(ws: Sequence[Any], dtype: Any, *, backward: bool, together: bool) -> list[Any]:
    made = prepared(ws, dtype, transposed=backward, together=together)
    return [whole(w) for w in made]


def _gathered_formats(ws: Sequence[Any]) -> list[Any]:
    """Weights of which those that are shards of one frozen matrix are whole. Arrays stay shards."""

    def gathered(w: Any) -> Any:
        value = stored(w)
        if value is w or not isinstance(value, Quantized) or not has_one_matrix(value):
            return w
        return dataclasses.replace(value, forward=w.with_value(value.forward).gathered())

    return [gathered(w) for w in ws]


def has_one_matrix(w: Any) -> bool:
    """Whether a weight is frozen in a format, as one matrix for both passes."""
    return isinstance(w, Quantized) and w.array is None and w.backward is None


def _for_backward(
    dys: Sequence[jax.Array], ws: Sequence[Any]
) -> tuple[tuple[jax.Array, ...], tuple[Any, ...]]:
    """Dys and weights of a backward. Of a frozen weight with one matrix, that is transposed.

    Scales that a transposition cannot keep multiply dy: ``dy (W s)ᵀ = (dy s) Wᵀ``.
    """
    made: list[tuple[jax.Array, Any]] = []
    for dy, w in zip(dys, ws, strict=True):
        if has_one_matrix(w):
            backward, factor = w.format.transposed(w.forward)
            w = dataclasses.replace(w, backward=backward)
            if factor is not None:
                dy = (dy.astype(factor.dtype) * as_row(factor, dy.ndim)).astype(dy.dtype)
        made.append((dy, w))
    dys, ws = zip(*made, strict=True)
    return dys, ws


def _count(columns: Columns) -> int:
    return sum(array.shape[-1] for array in columns)


def _gathered(
    call: Call, x: jax.Array, columns: Columns, ws: Sequence[Any], *, backward: bool = False
) -> tuple[tuple[jax.Array, ...], Columns]:
    """``all_gather(x) @ w`` for each w, and the gathered columns."""
    attributes: dict[str, Any] = {"columns_beside": _count(columns)}
    ws = _gathered_formats(ws)
    if backward:
        attributes["direction"] = "backward"
        (x,), ws = _for_backward([x], ws)
    backend, request = call.choose("all_gather_matmul", [x] * len(ws), ws, **attributes)
    (rows,) = format_of(ws).rows([x], of_gradient=backward)
    rows = multiplied(rows)
    weights: list[Any] = _weights(ws, x.dtype, backward=backward, together=False)
    if not columns:
        return tuple(backend.execute(request, [rows], weights)[0]), ()
    turned = request.transpose_w
    weights = [WeightsBeside((w,), turned) for w in weights]
    # The columns are a result. That x is gathered is no work of the request.
    returning = dataclasses.replace(request, keep_gathered=True)
    ys, gathered = backend.execute(returning, [RowsBeside((rows,), columns)], weights)
    return tuple(ys), columns_beside(gathered, request.shard_dimension)


def _scattered(
    call: Call, xs: Sequence[jax.Array], columns: Columns, ws: Sequence[Any], *, backward=False
) -> tuple[jax.Array, Columns]:
    """``reduce_scatter(sum of x @ w)``, and the columns, summed and scattered too."""
    attributes: dict[str, Any] = {"columns_beside": _count(columns)}
    ws = _gathered_formats(ws)
    if backward:
        attributes["direction"] = "backward"
        xs, ws = _for_backward(xs, ws)
    backend, request = call.choose("matmul_reduce_scatter", xs, ws, **attributes)
    rows = tuple(map(multiplied, format_of(ws).rows(xs, of_gradient=backward)))
    weights = _weights(ws, xs[0].dtype, backward=backward, together=True)
    if not columns:
        only: Any = backend.execute(request, rows, weights)[0]
        return only, ()
    weight = WeightsBeside(tuple(weights), request.transpose_w, returns_columns=True)
    pair: Any = backend.execute(request, [RowsBeside(rows, columns)], [weight])[0]
    return pair


def _summed(
    call: Call, xs: Sequence[jax.Array], columns: Columns, ws: Sequence[Any]
) -> tuple[jax.Array, Columns]:
    """``psum(sum of x @ w)``, and the sums of the columns."""
    ws = _gathered_formats(ws)
    backend, request = call.choose("matmul_all_reduce", xs, ws)
    rows = tuple(map(multiplied, format_of(ws).rows(xs)))
    weights = _weights(ws, xs[0].dtype, backward=False, together=True)
    y: Any = backend.execute(request, rows, weights)[0]
    return y, tuple(psum(array, call.axis_name) for array in columns)


def _sum_gradients(call: Call, ws: Sequence[Any], dy: jax.Array, dcolumns: Columns) -> Any:
    """The gradients of `_summed`: every device has dy, so nothing travels."""
    if tracks_varying_axes(call.axis_name):
        axes = frozenset((call.axis_name,)).union(*map(varying_axes, jax.tree.leaves(ws)))
        dy, dcolumns = jax.tree.map(lambda array: vary_over(array, axes), (dy, dcolumns))
    else:
        dy, dcolumns = jax.tree.map(lambda array: psum(array, call.axis_name), (dy, dcolumns))
    (dy,), ws = _for_backward([dy], _gathered_formats(ws))
    (rows,) = format_of(ws).rows([dy], of_gradient=True)
    weights = _weights(ws, dy.dtype, backward=True, together=False)
    turned = not call.transpose_w
    return tuple(matmul(multiplied(rows), w, turned) for w in weights), dcolumns


def _op(forward: Callable, backward: Callable) -> ReverseMode:
    """The differentiable op ``op(xs, columns, ws, call)`` of weights without gradients."""
    op: Any = ReverseMode(
        lambda xs, columns, ws, call: forward(call, xs, columns, ws), nondiff_argnums=(3,)
    )

    def keeping(xs: Any, columns: Columns, ws: Any, call: Call) -> Any:
        with call.suppress_recording():
            return op(xs, columns, ws, call), ws

    def gradients(call: Call, ws: Any, cotangents: Any) -> Any:
        dxs, dcolumns = backward(call, ws, *cotangents)
        return dxs, dcolumns, None

    op.defvjp(keeping, gradients)
    return op


#: ``all_gather(x) @ w`` for each w, and the gathered columns.
gather_matmul_frozen = _op(
    _gathered,
    lambda call, ws, dys, dcolumns: _scattered(call, dys, dcolumns, ws, backward=True),
)
#: ``reduce_scatter(sum of x @ w)``, and the columns, summed and scattered.
matmul_scatter_frozen = _op(
    _scattered,
    lambda call, ws, dy, dcolumns: _gathered(call, dy, dcolumns, ws, backward=True),
)
#: ``psum(sum of x @ w)``, and the sums of the columns.
matmul_all_reduce_frozen = _op(_summed, _sum_gradients)


def local_matmul_frozen(x: jax.Array, w: jax.Array) -> jax.Array:
    """``x @ w`` [..., N] on one device, whose backward computes no gradient of w."""
    return _local(x, lax.stop_gradient(w))


@functools.partial(ReverseMode)
def _local(x: jax.Array, w: jax.Array) -> jax.Array:
    return matmul(x, w)


_local.defvjp(lambda x, w: (_local(x, w), w), lambda w, dy: (matmul(dy, w, True), None))
