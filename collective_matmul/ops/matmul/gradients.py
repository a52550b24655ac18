"""The ops with their gradients, one rule for each, whatever their operands are stored as.

`collective_matmul.ops.matmul.api` derives them. Call them inside `jax.shard_map`. Local shapes are
those of `collective_matmul.ops.matmul.backend`; x and the weights are operands of
`collective_matmul.operands`. Forward and backward pass of an op each execute with the backend
chosen for their own request.

With the rows of a format in place of x and dy, and matrices in place of w::

    y  = X w      x and w
    dx = dY wᵀ    dy and wᵀ
    dw = Xᵀ dY    rows in the format, if it packs gradients; else the arrays

Between forward and backward pass an op keeps of x what the weight gradient contracts, and of each
weight what the user stores: a shard is gathered again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from collective_matmul._compat import (
    psum,
    psum_scatter,
    tracks_varying_axes,
    vary_over,
    varying_axes,
)
from collective_matmul.explicit_axes import product_spec, specs_like, with_auto_axes
from collective_matmul.operands.arithmetic import add
from collective_matmul.operands.chunked import Chunked, Gathered, whole_of
from collective_matmul.operands.multiply import contracted, matmul, multiplied, weight_gradients
from collective_matmul.operands.quantized import (
    format_of,
    gradient_of,
    is_trained,
    prepared,
    read_by_backward,
    with_read,
)
from collective_matmul.operands.sharded import Sharded, WeightShards, sharding_of, stored, whole
from collective_matmul.ops.matmul.backend import MatmulBackend
from collective_matmul.ops.matmul.backends import REFERENCE
from collective_matmul.ops.matmul.call import Call
from collective_matmul.ops.matmul.request import Op, Site
from collective_matmul.ops.matmul.reverse_mode import ReverseMode, undifferentiated
from collective_matmul.schedule.direct_scatter import scattered_sum


def op_of(forward: Callable, gradients: Callable, *, keeps_gathered: bool = False) -> ReverseMode:
    """The differentiable op ``op(xs, ws, call)``.

    Args:
      forward: ``forward(xs, ws, call)`` returns the results, and what the backward keeps of xs.
      gradients: ``gradients(call, kept, ws, cotangents)`` returns the gradients of xs, and those of
        the trained weights as arrays, in order.
      keeps_gathered: whether results are products and what was gathered, which the backward keeps
        too: then `kept` is a pair. Cotangents may be symbolic zeros, which mean that nothing else
        depends on it. JAX does not have them in a shard_map without `jax.jit`.
    """
    op: Any = ReverseMode(lambda xs, ws, call: forward(xs, ws, call)[0], nondiff_argnums=(2,))

    def refused(ws: Sequence[Any]) -> str | None:
        return None if keeps_gathered else format_of(ws).second_derivative_reason

    def keeping(xs: Any, ws: Any, call: Call) -> Any:
        if keeps_gathered:
            is_primal = lambda x: hasattr(x, "perturbed")  # noqa: E731
            xs, ws = jax.tree.map(lambda x: x.value, (xs, ws), is_leaf=is_primal)
        with call.suppress_recording():
            if reason := refused(ws):
                results, kept = undifferentiated(forward, reason)(xs, ws, call)
            else:
                results, kept = op(xs, ws, call), xs
        if not any(map(is_trained, ws)) and not jax.sharding.get_abstract_mesh().explicit_axes:
            kept = None
        return results, ((kept, results[1]) if keeps_gathered else kept, ws)

    def backward(call: Call, residuals: Any, cotangents: Any) -> Any:
        kept, ws = residuals
        reason = refused(ws)
        fun = undifferentiated(gradients, reason) if reason else gradients

        def specs() -> Any:
            rows = kept[0] if keeps_gathered else kept
            arrays = tuple(_array_of(w) for w in ws if is_trained(w))
            is_rows = lambda x: hasattr(x, "without_array")  # noqa: E731
            first = lambda x: jax.tree.leaves(x)[0]  # noqa: E731
            return specs_like((jax.tree.map(first, rows, is_leaf=is_rows), arrays))

        dxs, dws = with_auto_axes(functools.partial(fun, call), specs, kept, ws, cotangents)
        made = iter(dws)
        return dxs, tuple(gradient_of(w, next(made) if is_trained(w) else None) for w in ws)

    op.defvjp(keeping, backward, symbolic_zeros=keeps_gathered)
    return op


def _array_of(w: Any) -> jax.Array:
    value = stored(w)
    return value if isinstance(value, jax.Array) else value.array


def _weights(
    request: Site, ws: Sequence[Any], dtype: Any, *, transposed: bool = False, together: bool = True
) -> tuple[Any, ...]:
    """The weights of one pass: whole, unless its loop gathers them."""
    made = prepared(ws, dtype, transposed=transposed, together=together)
    return made if request.weight_shards is not None else tuple(map(whole, made))


def _gather_forward(x: Any, ws: Sequence[Any], call: Call) -> tuple[Any, Any]:
    """The products, with what was gathered if the call keeps it; and what is kept of x."""
    keep, stored_as = call.keep_gathered, format_of(ws)
    xs = [x] * len(ws)
    backend, request = call.choose("all_gather_matmul", xs, ws, keep_gathered=keep)

    def products(x: Any, ws: Any) -> Any:
        (rows,) = stored_as.rows([x])
        weights = _weights(request, ws, x.dtype, together=False)
        ys, gathered = backend.execute(request, [rows if keep else multiplied(rows)], weights)
        chunks, starts = _parts(contracted(gathered) if keep else None)
        return ys, chunks, starts, contracted(rows) if stored_as.packs_gradients else None

    def specs() -> Any:
        products = tuple(product_spec(x, _array_of(w), call.transpose_w) for w in ws)
        return products, specs_like(x), PartitionSpec(), specs_like(x)

    ys, chunks, starts, packed = with_auto_axes(products, specs, x, ws)
    gathered = chunks if starts is None else Chunked(chunks, starts)
    return (ys, gathered) if keep else ys, x if packed is None else packed


def _gather_gradients(
    call: Call, x: Any, ws: Sequence[Any], dys: Sequence[Any], gathered: Gathered = None
) -> Any:
    """The gradient of x, and of each trained weight; `gathered` is what the forward kept of X."""
    # Before the barrier, what computes dys can also find their largest magnitudes.
    rows = format_of(ws).rows(dys, of_gradient=True)
    co_gathered = x if gathered is None and any(map(is_trained, ws)) else None
    if gathered is None:
        # Without the barrier, XLA would reuse the forward's gather and keep its result until now.
        (co_gathered, rows), ws = _held((co_gathered, rows), ws)
    attributes = {"co_gathered": None if co_gathered is None else co_gathered.shape}
    backend, request = call.choose(
        "matmul_reduce_scatter", dys, ws, direction="backward", **attributes
    )
    if backend.gathers_under_weight_gradients(request):
        dws, weights, rows = backend.weight_gradients_first(request, ws, [co_gathered], rows)
        return backend.execute(request, [*map(multiplied, rows)], weights)[0], dws
    weights = _weights(request, ws, dys[0].dtype, transposed=True)
    dx, co_gathered = backend.execute(request, [*map(multiplied, rows)], weights, co_gathered)
    xs = [co_gathered if gathered is None else gathered]
    ys = [row for w, row in zip(ws, rows, strict=True) if is_trained(w)]
    return _with_weight_gradients(call, backend, request, dx, ws, xs, ys)


def _gather_keeping_gradients(call: Call, kept: Any, ws: Sequence[Any], cotangents: Any) -> Any:
    """`_gather_gradients` of an op that keeps what it gathered, from arrays."""
    (x, gathered), (dys, dgathered) = kept, cotangents
    dys, dimension = tuple(map(_instantiate, dys)), call.dimension
    call, ws = call.in_arrays(ws, "the program uses the gathered array elsewhere too")
    assert dimension is not None
    whole_cotangent = _whole_cotangent(gathered, dgathered, dimension)
    if whole_cotangent is None:
        return _gather_gradients(call, x, ws, dys, gathered)
    # What was gathered is used elsewhere too: one sum over devices of both cotangents.
    weights = [whole(w) for w in prepared(ws, x.dtype)]
    pairs = zip(dys, weights, strict=True)
    products = [matmul(dy, w, not call.transpose_w) for dy, w in pairs]
    dx = psum_scatter(add(*products, whole_cotangent), call.axis_name, dimension)
    request = call.request("matmul_reduce_scatter", dys, ws, direction="backward")
    return _with_weight_gradients(call, REFERENCE, request, dx, ws, [gathered], dys)


_gather = op_of(_gather_forward, _gather_gradients)
_gather_keeping = op_of(_gather_forward, _gather_keeping_gradients, keeps_gathered=True)


def gather_matmul(
    x: jax.Array, ws: Sequence[Any], call: Call
) -> tuple[tuple[jax.Array, ...], Gathered]:
    """``all_gather(x) @ w`` for each w; and what was gathered, if the call keeps it."""
    if call.keep_gathered:
        return _gather_keeping(x, tuple(ws), call)
    return _gather(x, tuple(ws), call), None


def _sum_of_products(
    op: Op, xs: Sequence[Any], ws: Sequence[Any], call: Call
) -> tuple[jax.Array, Any]:
    """The sum over devices of sums of products, and what is kept of the xs."""
    backend, request = call.choose(op, xs, ws)
    stored_as = format_of(ws)

    def product(xs: Any, ws: Any) -> Any:
        rows, weights = stored_as.rows(xs), _weights(request, ws, xs[0].dtype)
        y, _ = backend.execute(request, [*map(multiplied, rows)], weights)
        return y, tuple(map(contracted, rows)) if stored_as.packs_gradients else None

    def specs() -> Any:
        kept = specs_like(tuple(xs)) if stored_as.packs_gradients else None
        return product_spec(xs[0], _array_of(ws[0]), call.transpose_w), kept

    y, packed = with_auto_axes(product, specs, xs, ws)
    return y, xs if packed is None else packed


def _scatter_gradients(call: Call, xs: Sequence[Any], ws: Sequence[Any], dy: jax.Array) -> Any:
    """The gradient of each x, and of each trained weight."""
    trained = any(map(is_trained, ws))
    if format_of(ws).packs_gradients or sharding_of(ws[0]) is not None:
        # Without the barrier, XLA would transpose packed rows in the forward and keep that too, or
        # reuse the weights that the forward gathered.
        (xs, dy), ws = _held((xs, dy), ws)
    attributes = {"keep_gathered": trained, "direction": "backward"}
    backend, request = call.choose("all_gather_matmul", [dy] * len(ws), ws, **attributes)
    (rows,) = format_of(ws).rows([dy], of_gradient=True)
    if backend.gathers_under_weight_gradients(request):
        dws, weights, (rows,) = backend.weight_gradients_first(request, ws, xs, [rows])
        return backend.execute(request, [rows], weights)[0], dws
    weights = _weights(request, ws, dy.dtype, transposed=True, together=False)
    sent = rows if trained else multiplied(rows)
    dxs, gathered = backend.execute(request, [sent], weights)
    kept = [x for x, w in zip(xs or (), ws, strict=trained) if is_trained(w)]
    return _with_weight_gradients(call, backend, request, tuple(dxs), ws, kept, [gathered])


#: ``reduce_scatter(sum of x @ w)`` over pairs.
matmul_scatter = op_of(
    functools.partial(_sum_of_products, "matmul_reduce_scatter"), _scatter_gradients
)


def _all_reduce_gradients(call: Call, xs: Sequence[Any], ws: Sequence[Any], dy: jax.Array) -> Any:
    """The gradients. There is no communication that a matmul could hide."""
    if tracks_varying_axes(call.axis_name):
        dy = vary_over(dy, varying_axes(jax.tree.leaves((xs, ws))[0]))
    else:
        dy = psum(dy, call.axis_name)
    (rows,) = format_of(ws).rows([dy], of_gradient=True)
    weights = map(whole, prepared(ws, dy.dtype, transposed=True, together=False))
    dxs = tuple(matmul(multiplied(rows), w, transpose_w=True) for w in weights)
    trained = [(x, w) for x, w in zip(xs or (), ws, strict=False) if is_trained(w)]
    dws = ()
    if trained:
        kept, ws = zip(*trained, strict=True)
        options = {"shards": 1, "dimension": None}
        dws = weight_gradients(format_of(ws), kept, [rows], dy.dtype, **options)
    return dxs, tuple(_shard_of_gradient(call, *pair) for pair in zip(ws, dws, strict=False))


#: ``psum(sum of x @ w)`` over pairs.
matmul_all_reduce = op_of(
    functools.partial(_sum_of_products, "matmul_all_reduce"), _all_reduce_gradients
)


@functools.partial(ReverseMode, nondiff_argnums=(1, 2))
def gather_weight(shard: jax.Array, sharding: WeightShards, dtype: Any) -> jax.Array:
    """The whole weight [K, N] of a shard, cast to `dtype` before the gather.

    Its gradient is summed over the axis in the shard's dtype, and scattered.
    """

    def gather(shard: jax.Array) -> jax.Array:
        return Sharded(shard.astype(dtype), sharding).gathered()

    return with_auto_axes(gather, lambda: specs_like(shard), shard)


def _gather_weight_backward(
    sharding: WeightShards, dtype: Any, shard: jax.Array, gradient: jax.Array
) -> tuple[jax.Array]:
    del dtype

    def scatter(gradient: jax.Array) -> jax.Array:
        return psum_scatter(gradient.astype(shard.dtype), sharding.axis_name, sharding.dimension)

    return (with_auto_axes(scatter, lambda: specs_like(shard), gradient),)


gather_weight.defvjp(
    lambda shard, *args: (gather_weight(shard, *args), shard), _gather_weight_backward
)


def _with_weight_gradients(
    call: Call,
    backend: MatmulBackend,
    request: Site,
    dxs: Any,
    ws: Sequence[Any],
    xs: Sequence[Any],
    ys: Sequence[Any],
) -> tuple[Any, tuple[jax.Array, ...]]:
    """The gradients of xs, and those of the trained weights, contracted from rows of x and y."""
    trained = tuple(filter(is_trained, ws))
    if not trained:
        return dxs, ()
    scatter = functools.partial(_shard_of_gradient, call)
    return backend.weight_gradients(request, dxs, trained, xs, ys, scatter)


def _shard_of_gradient(call: Call, w: Any, dw: jax.Array) -> jax.Array:
    """The gradient of what is stored of w, from that of the whole: summed over its axis."""
    sharding, dtype = sharding_of(w), stored(w).dtype
    if sharding is None:
        return dw
    axis_name, dimension = sharding.axis_name, sharding.dimension
    if not format_of([w]).travels_in_loop and call.copies_between_peers(sharding):
        return scattered_sum(dw, axis_name, dimension, dtype)
    return psum_scatter(dw.astype(dtype), axis_name, dimension)


def _held(operands: Any, ws: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Operands of a backward behind a barrier, and the weights.

    Of shards, only what the backward gathers enters the barrier: XLA would gather it long before.
    The rest would stay in memory until then.
    """
    if not isinstance(ws[0], Sharded):
        return lax.optimization_barrier(operands), ws
    operands, read = lax.optimization_barrier((operands, [*map(read_by_backward, ws)]))
    return operands, tuple(map(with_read, ws, read))


def _whole_cotangent(gathered: Gathered, cotangent: Any, dimension: int) -> jax.Array | None:
    """The cotangent of what was kept, as one array; None if it is zero."""
    chunks = cotangent.chunks if isinstance(gathered, Chunked) else [cotangent]
    if all(map(_is_zero, chunks)):
        return None
    if not isinstance(gathered, Chunked):
        return cotangent
    return whole_of(Chunked([*map(_instantiate, chunks)], gathered.starts), dimension)


def _parts(gathered: Gathered) -> tuple[Any, Any]:
    """The chunks and their starts; or what is not `Chunked`, and None."""
    if isinstance(gathered, Chunked):
        return gathered.chunks, gathered.starts
    return gathered, None


def _is_zero(value: Any) -> bool:
    return isinstance(value, SymbolicZero)


def _instantiate(value: Any) -> Any:
    """The cotangent as an array, also if it is symbolically zero."""
    return jnp.zeros(value.shape, value.dtype) if _is_zero(value) else value
