"""The ops with operands in 8 bits, with their gradients.

`collective_matmul.ops` derives them, and `collective_matmul.fp8` describes the recipes. Call them
inside `jax.shard_map`. Arguments and local shapes are those of `collective_matmul.backends.base`.

Quantized are, each along the dimension that its matmul contracts::

    y  = X w      x and w
    dx = dY wᵀ    dy and wᵀ

    dw = Xᵀ dY    X and dY, as they were quantized for the matmuls above

The last line is for recipes whose weight gradient is in 8 bits. Else what it is computed from
travels in x's dtype, beside the message if there is one. Between forward and backward x is kept as
what its weight gradient is computed from: the message, or x as the user gave it.

Copies of weights that were quantized before (`quantized_weights`) are multiplied in place of the
weights, which then only have the gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from collective_matmul import gradients
from collective_matmul._compat import (
    psum,
    psum_scatter,
    tracks_varying_axes,
    vary_over,
    varying_axes,
)
from collective_matmul.backends import chunked_array
from collective_matmul.backends.arithmetic import contract_rows, matmul
from collective_matmul.backends.base import Backend, GatherResidual
from collective_matmul.backends.chunked_array import whole_of
from collective_matmul.backends.ring.direct_scatter import scattered_sum, scatters_directly
from collective_matmul.backends.weight_blocks import ShardedWeights
from collective_matmul.explicit_axes import product_spec, specs_like, with_auto_axes
from collective_matmul.fp8 import (
    RECIPES,
    Recipe,
    ScaledMatrix,
    gathered,
    quantize_rows,
)
from collective_matmul.fp8_messages import value_columns
from collective_matmul.fp8_weight_gradients import weight_gradients
from collective_matmul.gradients import (
    OpParams,
    gather_with_auto_axes,
    keeping_op,
    tie_with_barrier,
)
from collective_matmul.quantized_weights import Copies, copies_of, sharded_dimension
from collective_matmul.reverse_mode import ReverseMode, undifferentiated
from collective_matmul.site import Op

_NO_SECOND_DERIVATIVE = (
    "second derivative of a collective matmul with fp8: its gradients are computed from operands in"
    " 8 bits, and rounding has none; leave fp8 out for ops that are differentiated twice"
)


def _op(forward: Callable, gradients: Callable) -> ReverseMode:
    """The op of a forward, which returns the results and what the backward needs of the xs."""

    def results(xs: Any, ws: Any, call: OpParams, copies: Copies | None = None) -> Any:
        return forward(xs, ws, call, copies)[0]

    # Its type is not that of its class for type checkers.
    op: Any = ReverseMode(results, nondiff_argnums=(2,))
    op.define_gradients(*(undifferentiated(f, _NO_SECOND_DERIVATIVE) for f in (gradients, forward)))
    return op


def _gather_forward(
    x: jax.Array, ws: tuple[jax.Array, ...], call: OpParams, copies: Copies | None
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """The products, and what the backward needs of x."""
    chosen = _chosen(call, "all_gather_matmul", (x,) * len(ws), ws)

    def products(x, ws, copies):
        (sent,) = quantize_rows([x], _recipe(call))
        return _gather(chosen, x, sent, ws, call, copies)[0], _kept(call, x, sent)

    def specs():
        return tuple(product_spec(x, w) for w in ws), specs_like(x)

    return with_auto_axes(products, specs, x, ws, copies)


def _gather_matmul_gradients(call: OpParams, operands, dys):
    x, ws, copies = operands
    recipe, dimension, dtype = _recipe(call), call.shard_dimension, dys[0].dtype
    # Before the barrier, what computes dys can also find their largest magnitudes.
    sent = quantize_rows(dys, recipe, recipe.gradient_dtype)
    # Without the barrier, XLA would reuse the forward's gather and keep its result until now.
    (x, dys, sent), ws, copies = _with_weights_held(call, (x, tuple(dys), sent), ws, copies)
    columns = value_columns(x) if recipe.weight_gradient_in_fp8 else x.shape[-1]
    attributes: dict[str, Any] = {"direction": "backward", "co_gathered": (*x.shape[:-1], columns)}
    chosen = _chosen(call, "matmul_reduce_scatter", dys, ws, **attributes)
    dx, gathered = chosen.matmul_reduce_scatter(
        sent,
        _weights(call, ws, dtype, copies, transposed=True),
        call.axis_name,
        dimension=dimension,
        co_gathered=x,
    )
    if recipe.weight_gradient_in_fp8:
        whole = whole_of(gathered, dimension)
        dws = weight_gradients([whole], sent, recipe, dtype, **_shards(call))
    else:
        assert gathered is not None
        dws = chunked_array.weight_gradients(gathered, dys, dimension=dimension)
    dx, dws = tie_with_barrier(gathered, dx, dws)
    return dx, tuple(_shard_of_gradient(call, *each) for each in zip(dws, ws, strict=True))


#: ``all_gather(x) @ w`` for each w.
gather_matmul = _op(_gather_forward, _gather_matmul_gradients)


def _gather_and_keep(x: jax.Array, ws: tuple[jax.Array, ...], call: OpParams):
    chosen = _chosen(call, "all_gather_matmul", (x,) * len(ws), ws, keep_gathered=True)

    def gather(x, ws):
        (sent,) = quantize_rows([x], _recipe(call))
        return _gather(chosen, x, sent, ws, call, co_gathered=x)

    return gather_with_auto_axes(gather, x, ws)


#: ``all_gather(x) @ w`` for each w; and the gathered x, which travels in its dtype too. The
#: gradients' operands have that dtype.
gather_and_keep = keeping_op(_gather_and_keep)


def _scatter_forward(
    xs: tuple[jax.Array, ...],
    ws: tuple[jax.Array, ...],
    call: OpParams,
    copies: Copies | None,
) -> tuple[jax.Array, Any]:
    """The product, and what the backward needs of xs."""
    chosen = _chosen(call, "matmul_reduce_scatter", xs, ws)

    def product(xs, ws, copies):
        sent, scaled = quantize_rows(xs, _recipe(call)), _weights(call, ws, xs[0].dtype, copies)
        dimension = call.shard_dimension
        y, _ = chosen.matmul_reduce_scatter(sent, scaled, call.axis_name, dimension=dimension)
        return y, _kept(call, xs, sent)

    return with_auto_axes(product, lambda: _sum_specs(xs, ws), xs, ws, copies)


def _matmul_scatter_gradients(call: OpParams, operands, dy):
    xs, ws, copies = operands
    recipe, dimension = _recipe(call), call.shard_dimension
    attributes = {"keep_gathered": True, "direction": "backward"}
    if recipe.weight_gradient_in_fp8:
        # Without the barrier, XLA would transpose the messages in the forward and keep that too.
        xs, dy = lax.optimization_barrier((xs, dy))
    if call.weight_shards is not None:
        dy, ws, copies = _with_weights_held(call, dy, ws, copies)
    chosen = _chosen(call, "all_gather_matmul", (dy,) * len(ws), ws, **attributes)
    (sent,) = quantize_rows([dy], recipe, recipe.gradient_dtype)
    dxs, gathered = chosen.all_gather_matmul(
        sent,
        _each_weight(call, ws, dy.dtype, copies, transposed=True),
        call.axis_name,
        dimension=dimension,
        keep_gathered=recipe.weight_gradient_in_fp8,
        co_gathered=None if recipe.weight_gradient_in_fp8 else dy,
    )
    if recipe.weight_gradient_in_fp8:
        whole = whole_of(gathered, dimension)
        dws = weight_gradients(xs, [whole] * len(xs), recipe, dy.dtype, **_shards(call))
    else:
        dws = [gradients.weight_gradient(x, gathered, dimension, transpose_w=False) for x in xs]
    dxs, dws = tie_with_barrier(gathered, tuple(dxs), dws)
    return dxs, tuple(_shard_of_gradient(call, *each) for each in zip(dws, ws, strict=True))


#: ``reduce_scatter(sum of x @ w)`` over pairs, which have their scales in common.
matmul_scatter = _op(_scatter_forward, _matmul_scatter_gradients)


def _all_reduce_forward(
    xs: tuple[jax.Array, ...],
    ws: tuple[jax.Array, ...],
    call: OpParams,
    copies: Copies | None,
) -> tuple[jax.Array, Any]:
    """The product, and what the backward needs of xs."""
    chosen = _chosen(call, "matmul_all_reduce", xs, ws)

    def all_reduce(xs, ws, copies):
        sent, scaled = quantize_rows(xs, _recipe(call)), _weights(call, ws, xs[0].dtype, copies)
        return chosen.matmul_all_reduce(sent, scaled, call.axis_name), _kept(call, xs, sent)

    return with_auto_axes(all_reduce, lambda: _sum_specs(xs, ws), xs, ws, copies)


def _matmul_all_reduce_gradients(call: OpParams, operands, dy):
    xs, ws, copies = operands  # There is no communication that a matmul could hide.
    recipe = _recipe(call)
    if tracks_varying_axes(call.axis_name):
        dy = vary_over(dy, varying_axes(xs[0]))
    else:
        dy = psum(dy, call.axis_name)
    (quantized,) = quantize_rows([dy], recipe, recipe.gradient_dtype)
    scaled = _each_weight(call, ws, dy.dtype, copies, transposed=True)
    dxs = [matmul(quantized, w) for w in scaled]
    if recipe.weight_gradient_in_fp8:
        dws = weight_gradients(xs, [quantized] * len(xs), recipe, dy.dtype)
    else:
        dws = [contract_rows(x, dy) for x in xs]
    return tuple(dxs), tuple(_shard_of_gradient(call, *each) for each in zip(dws, ws, strict=True))


#: ``psum(sum of x @ w)`` over pairs, which have their scales in common.
matmul_all_reduce = _op(_all_reduce_forward, _matmul_all_reduce_gradients)


def _gather(
    chosen: Backend,
    x: jax.Array,
    sent: jax.Array,
    ws: Sequence[jax.Array],
    call: OpParams,
    copies: Copies | None = None,
    co_gathered: jax.Array | None = None,
) -> tuple[tuple[jax.Array, ...], GatherResidual]:
    """The products of the message of x, gathered, and each w; and `co_gathered`, whole."""
    return chosen.all_gather_matmul(
        sent,
        _each_weight(call, ws, x.dtype, copies),
        call.axis_name,
        dimension=call.shard_dimension,
        co_gathered=co_gathered,
    )


def _shards(call: OpParams) -> dict[str, Any]:
    """What a gathered message consists of."""
    return {"shards": lax.axis_size(call.axis_name), "dimension": call.shard_dimension}


def _kept(call: OpParams, xs: Any, sent: Any) -> Any:
    """What the backward needs of the xs: their messages, or themselves."""
    return sent if _recipe(call).weight_gradient_in_fp8 else xs


def _sum_specs(xs: Sequence[jax.Array], ws: Sequence[jax.Array]) -> tuple[Any, Any]:
    """The specs of the sum of products, and of what is kept of the xs."""
    return product_spec(xs[0], ws[0]), specs_like(tuple(xs))


def _chosen(
    call: OpParams, op: Op, xs: Sequence[Any], ws: Sequence[Any], **attributes: Any
) -> Backend:
    """The backend for one pass. It gets whole weights; `attributes` are those of its `Site`."""
    if call.weight_shards is not None:
        ws = ShardedWeights(tuple(ws), call.weight_shards, ws[0].dtype).whole
        attributes["gathered_shards"] = call.weight_shards
        call = dataclasses.replace(call, weight_shards=None)
    return call.choose(op, xs, ws, **attributes)


def _each_weight(
    call: OpParams,
    ws: Sequence[jax.Array],
    dtype: Any,
    copies: Copies | None,
    *,
    transposed: bool = False,
) -> list[ScaledMatrix]:
    """As `_weights`, for weights that have no scales in common."""
    own = [None] * len(ws) if copies is None else [(copy,) for copy in copies]
    pairs = zip(ws, own, strict=True)
    return [_weights(call, [w], dtype, copy, transposed=transposed)[0] for w, copy in pairs]


def _weights(
    call: OpParams,
    ws: Sequence[jax.Array],
    dtype: Any,
    copies: Copies | None,
    *,
    transposed: bool = False,
) -> tuple[ScaledMatrix, ...]:
    """The quantized weights [K, N], or [N, K] if `transposed`, of whole weights or of shards.

    Shards are quantized, unless they were before, and then gathered.
    """
    recipe, shards = _recipe(call), call.weight_shards
    if copies is None:
        cast = [w.astype(dtype) for w in ws]
        scaled = copies_of(cast, recipe, shards, transposed=transposed)
    else:  # The forward of a weight may be the backward of its transpose.
        operand_dtype = recipe.gradient_dtype if transposed else recipe.dtype
        quantized_before = (pair[transposed] for pair in copies)
        scaled = tuple(
            dataclasses.replace(copy, operand_dtype=operand_dtype) for copy in quantized_before
        )
    if shards is None:
        return scaled
    dimension = sharded_dimension(shards, transposed)
    return tuple(gathered(each, shards.axis_name, dimension) for each in scaled)


def _with_weights_held(
    call: OpParams, operands: Any, ws: tuple[jax.Array, ...], copies: Copies | None
) -> tuple[Any, tuple[jax.Array, ...], Copies | None]:
    """Operands of a backward behind a barrier, and the weights and their copies.

    Shards wait there too, if the backward gathers them: XLA would gather them long before. So it
    does with the copies for the backward alone, as others would stay until then.
    """
    if call.weight_shards is None:
        return lax.optimization_barrier(operands), ws, copies
    if copies is None:
        operands, ws = lax.optimization_barrier((operands, ws))
        return operands, ws, None
    forward, backward = zip(*copies, strict=True)
    operands, backward = lax.optimization_barrier((operands, backward))
    return operands, ws, tuple(zip(forward, backward, strict=True))


def _shard_of_gradient(call: OpParams, dw: jax.Array, w: jax.Array) -> jax.Array:
    """The gradient of w, of which dw is the whole: summed over its axis in its dtype."""
    shards = call.weight_shards
    if shards is None:
        return dw.astype(w.dtype)
    if scatters_directly(shards, call.implementation, call.divergent_axes):
        return scattered_sum(dw, shards, w.dtype)
    dw = dw.astype(w.dtype)
    return psum_scatter(dw, shards.axis_name, shards.dimension)


def _recipe(call: OpParams) -> Recipe:
    assert call.fp8 is not None
    return RECIPES[call.fp8]
