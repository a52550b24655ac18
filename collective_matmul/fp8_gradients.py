"""The ops with operands in 8 bits, with their gradients.

`collective_matmul.ops` derives them, and `collective_matmul.fp8` describes the recipes. Call them
inside `jax.shard_map`. Arguments and local shapes are those of `collective_matmul.backends.base`.

Quantized are, each along the dimension that its matmul contracts::

    y  = X w      x and w
    dx = dY wᵀ    dy and wᵀ

    dw = Xᵀ dY    what travels, as it was quantized for the matmul above; and with its scales, the
                  other one

The last line is for recipes whose weight gradient is in 8 bits. Else what it is computed from
travels in x's dtype, beside the message if there is one. Between forward and backward x is kept as
the user gave it.

Copies of weights that were quantized before (`quantized_weights`) are multiplied in place of the
weights, which then only have the gradients.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from collective_matmul import gradients
from collective_matmul._compat import tracks_varying_axes, vary_over, varying_axes
from collective_matmul.backends import chunked_array
from collective_matmul.backends.arithmetic import contract_rows, matmul
from collective_matmul.backends.base import Backend, GatherResidual
from collective_matmul.backends.chunked_array import whole_of
from collective_matmul.backends.ring.direct_scatter import scattered_sum, scatters_directly
from collective_matmul.backends.weight_blocks import ShardedWeights
from collective_matmul.explicit_axes import product_spec, with_auto_axes
from collective_matmul.fp8 import (
    RECIPES,
    Recipe,
    ScaledMatrix,
    gathered,
    quantize_rows,
    weight_gradient,
)
from collective_matmul.fp8_messages import largest_magnitude
from collective_matmul.gradients import (
    OpParams,
    ReverseMode,
    gather_with_auto_axes,
    keeping_op,
    tie_with_barrier,
)
from collective_matmul.quantized_weights import Copies, copies_of, sharded_dimension
from collective_matmul.site import Op

# The types of `jax.custom_vjp` do not survive `functools.partial`.
_custom_vjp: Any = functools.partial(ReverseMode, nondiff_argnums=(2,))


@_custom_vjp
def gather_matmul(
    x: jax.Array, ws: tuple[jax.Array, ...], call: OpParams, copies: Copies | None = None
) -> tuple[jax.Array, ...]:
    """``all_gather(x) @ w`` for each w."""
    chosen = _chosen(call, "all_gather_matmul", (x,) * len(ws), ws)

    def products(x, ws, copies):
        return _gather(chosen, x, ws, call, copies)[0]

    specs = lambda: tuple(product_spec(x, w) for w in ws)  # noqa: E731
    return with_auto_axes(products, specs, x, ws, copies)


def _gather_matmul_gradients(call: OpParams, operands, dys):
    x, ws, copies = operands
    recipe, dimension = _recipe(call), call.shard_dimension
    # Before the barrier, what computes dys can also find their largest magnitudes.
    sent = quantize_rows(dys, recipe, recipe.gradient_dtype)
    # Without the barrier, XLA would reuse the forward's gather and keep its result until now.
    (x, dys, sent), ws, copies = _with_weights_held(call, (x, tuple(dys), sent), ws, copies)
    attributes: dict[str, Any] = {"direction": "backward", "co_gathered": x.shape}
    chosen = _chosen(call, "matmul_reduce_scatter", dys, ws, **attributes)
    co_gathered = quantize_rows([x], recipe)[0] if recipe.weight_gradient_in_fp8 else x
    dx, gathered = chosen.matmul_reduce_scatter(
        sent,
        _weights(call, ws, x.dtype, copies, transposed=True),
        call.axis_name,
        dimension=dimension,
        co_gathered=co_gathered,
    )
    if recipe.weight_gradient_in_fp8:
        whole, dtypes = whole_of(gathered, dimension), (recipe.dtype, recipe.gradient_dtype)
        # The dys have their scale in common, so the message of one tells the largest of all.
        largest = largest_magnitude(sent[0], dys[0].shape[-1], recipe.gradient_dtype)
        dws = tuple(weight_gradient(whole, dy, dtypes, largest=largest) for dy in dys)
    else:
        assert gathered is not None
        dws = chunked_array.weight_gradients(gathered, dys, dimension=dimension)
    dx, dws = tie_with_barrier(gathered, dx, dws)
    return dx, tuple(_shard_of_gradient(call, *each) for each in zip(dws, ws, strict=True))


gather_matmul.define_gradients(_gather_matmul_gradients)


def _gather_and_keep(x: jax.Array, ws: tuple[jax.Array, ...], call: OpParams):
    chosen = _chosen(call, "all_gather_matmul", (x,) * len(ws), ws, keep_gathered=True)

    def gather(x, ws):
        return _gather(chosen, x, ws, call, co_gathered=x)

    return gather_with_auto_axes(gather, x, ws)


#: ``all_gather(x) @ w`` for each w; and the gathered x, which travels in its dtype too. The
#: gradients' operands have that dtype.
gather_and_keep = keeping_op(_gather_and_keep)


@_custom_vjp
def matmul_scatter(
    xs: tuple[jax.Array, ...],
    ws: tuple[jax.Array, ...],
    call: OpParams,
    copies: Copies | None = None,
) -> jax.Array:
    """``reduce_scatter(sum of x @ w)`` over pairs, which have their scales in common."""
    chosen = _chosen(call, "matmul_reduce_scatter", xs, ws)

    def product(xs, ws, copies):
        sent, scaled = quantize_rows(xs, _recipe(call)), _weights(call, ws, xs[0].dtype, copies)
        dimension = call.shard_dimension
        return chosen.matmul_reduce_scatter(sent, scaled, call.axis_name, dimension=dimension)[0]

    return with_auto_axes(product, lambda: product_spec(xs[0], ws[0]), xs, ws, copies)


def _matmul_scatter_gradients(call: OpParams, operands, dy):
    xs, ws, copies = operands
    recipe, dimension = _recipe(call), call.shard_dimension
    attributes = {"keep_gathered": True, "direction": "backward"}
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
        whole, dtypes = whole_of(gathered, dimension), (recipe.gradient_dtype, recipe.dtype)
        dws = [weight_gradient(whole, x, dtypes, transposed=True) for x in xs]
    else:
        dws = [gradients.weight_gradient(x, gathered, dimension, transpose_w=False) for x in xs]
    dxs, dws = tie_with_barrier(gathered, tuple(dxs), dws)
    return dxs, tuple(_shard_of_gradient(call, *each) for each in zip(dws, ws, strict=True))


matmul_scatter.define_gradients(_matmul_scatter_gradients)


@_custom_vjp
def matmul_all_reduce(
    xs: tuple[jax.Array, ...],
    ws: tuple[jax.Array, ...],
    call: OpParams,
    copies: Copies | None = None,
) -> jax.Array:
    """``psum(sum of x @ w)`` over pairs, which have their scales in common."""
    chosen = _chosen(call, "matmul_all_reduce", xs, ws)

    def all_reduce(xs, ws, copies):
        sent, scaled = quantize_rows(xs, _recipe(call)), _weights(call, ws, xs[0].dtype, copies)
        return chosen.matmul_all_reduce(sent, scaled, call.axis_name)

    return with_auto_axes(all_reduce, lambda: product_spec(xs[0], ws[0]), xs, ws, copies)


def _matmul_all_reduce_gradients(call: OpParams, operands, dy):
    xs, ws, copies = operands  # There is no communication that a matmul could hide.
    recipe = _recipe(call)
    if tracks_varying_axes(call.axis_name):
        dy = vary_over(dy, varying_axes(xs[0]))
    else:
        dy = lax.psum(dy, call.axis_name)
    (quantized,) = quantize_rows([dy], recipe, recipe.gradient_dtype)
    scaled = _each_weight(call, ws, dy.dtype, copies, transposed=True)
    dxs = [matmul(quantized, w) for w in scaled]
    if recipe.weight_gradient_in_fp8:
        dtypes = recipe.gradient_dtype, recipe.dtype
        dws = [weight_gradient(quantized, x, dtypes, transposed=True) for x in xs]
    else:
        dws = [contract_rows(x, dy) for x in xs]
    return tuple(dxs), tuple(_shard_of_gradient(call, *each) for each in zip(dws, ws, strict=True))


matmul_all_reduce.define_gradients(_matmul_all_reduce_gradients)


def _gather(
    chosen: Backend,
    x: jax.Array,
    ws: Sequence[jax.Array],
    call: OpParams,
    copies: Copies | None = None,
    co_gathered: jax.Array | None = None,
) -> tuple[tuple[jax.Array, ...], GatherResidual]:
    """The products of the gathered x and each w, quantized; and `co_gathered`, whole."""
    return chosen.all_gather_matmul(
        quantize_rows([x], _recipe(call))[0],
        _each_weight(call, ws, x.dtype, copies),
        call.axis_name,
        dimension=call.shard_dimension,
        co_gathered=co_gathered,
    )


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
    return lax.psum_scatter(dw, shards.axis_name, scatter_dimension=shards.dimension, tiled=True)


def _recipe(call: OpParams) -> Recipe:
    assert call.fp8 is not None
    return RECIPES[call.fp8]
