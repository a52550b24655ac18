"""The ops on matrices with their gradients, which `collective_matmul.ops` derives.

Call them inside `jax.shard_map`. Arguments and local shapes are those of
`collective_matmul.backends.base`. Forward and backward pass of an op each execute with the backend
chosen for their own site.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from collective_matmul._compat import (
    inside_branch_or_loop,
    psum,
    psum_scatter,
    tracks_varying_axes,
    vary_over,
    varying_axes,
)
from collective_matmul.backends import chunked_array
from collective_matmul.backends.arithmetic import add, contract_rows, matmul
from collective_matmul.backends.base import Backend, GatherResidual
from collective_matmul.backends.chunked_array import ChunkedArray
from collective_matmul.dispatch.recording import record_decisions
from collective_matmul.dispatch.selection import choose
from collective_matmul.explicit_axes import product_spec, specs_like, with_auto_axes
from collective_matmul.fp8 import RecipeName
from collective_matmul.reverse_mode import ReverseMode
from collective_matmul.site import Op, Site, WeightShards
from collective_matmul.source_location import SourceLocation, calling_location


@dataclass(frozen=True)
class OpParams:
    """Parameters of an op, for its forward and its backward pass.

    Attributes:
      axis_name: the mesh axis.
      dimension: the gathered or scattered dimension; None for `matmul_all_reduce`, and for einsums,
        which have a label instead.
      implementation: names of the requested backends, best first, or None.
      transpose_w: whether weights are [N, K].
      keep_gathered: whether the gathered array is a result too.
      divergent_axes: see `Site`.
      weight_shards: see `Site`.
      fp8: see `Site`.
      fp8_refused: see `Site`.
      source: location of the call in the user's program.
      replaces: the user's collective that the op replaces, or None.
    """

    axis_name: str
    dimension: int | None
    implementation: tuple[str, ...] | None
    transpose_w: bool = False
    keep_gathered: bool = False
    divergent_axes: tuple[str, ...] = ()
    weight_shards: WeightShards | None = None
    fp8: RecipeName | None = None
    fp8_refused: str | None = None
    source: SourceLocation | None = field(default=None, compare=False)
    replaces: str | None = field(default=None, compare=False)

    @property
    def shard_dimension(self) -> int:
        """The dimension that is gathered or scattered, of ops that have one."""
        assert self.dimension is not None
        return self.dimension

    def choose(self, op: Op, xs: Sequence, ws: Sequence, **attributes: Any) -> Backend:
        """The backend for one pass; `attributes` are further attributes of its `Site`."""
        transpose_w = self.transpose_w != (attributes.get("direction") == "backward")
        site = Site(
            op=op,
            operands=tuple(
                (x.shape, w.shape[::-1] if transpose_w else w.shape)
                for x, w in zip(xs, ws, strict=True)
            ),
            dtype=xs[0].dtype,
            axis_name=self.axis_name,
            axis_size=lax.axis_size(self.axis_name),
            weight_shards=self.weight_shards,
            fp8=self.fp8,
            fp8_refused=self.fp8_refused,
            dimension=self.dimension,
            transpose_w=transpose_w,
            divergent_axes=self.divergent_axes,
            source=self.source,
            replaces=self.replaces,
            **attributes,
        )
        return choose(site, self.implementation)

    def without_fp8(self, reason: str) -> OpParams:
        """The same, with operands in their dtype; `reason` says why, where they were to be fp8."""
        return self if self.fp8 is None else replace(self, fp8=None, fp8_refused=reason)

    def suppress_recording(self) -> contextlib.AbstractContextManager:
        """A context that hides decisions which were recorded when the op replaced a collective."""
        return record_decisions(hidden=True) if self.replaces else contextlib.nullcontext()


def op_params(
    axis_name: str,
    dimension: int | None,
    implementation: tuple[str, ...] | None,
    weight_shards: WeightShards | None = None,
    fp8: RecipeName | None = None,
) -> OpParams:
    """The parameters of an op that the user's program calls now."""
    mesh = jax.sharding.get_abstract_mesh()
    further = [a for a in mesh.manual_axes if a != axis_name and mesh.shape[a] > 1]
    divergent = tuple(further) if further and inside_branch_or_loop() else ()
    return OpParams(
        axis_name,
        dimension,
        implementation,
        divergent_axes=divergent,
        weight_shards=weight_shards,
        fp8=fp8,
        source=calling_location(),
    )


# The types of `jax.custom_vjp` do not survive `functools.partial`.
_custom_vjp: Any = functools.partial(ReverseMode, nondiff_argnums=(2,))


def gather_matmul(
    x: jax.Array, ws: tuple[jax.Array, ...], call: OpParams
) -> tuple[tuple[jax.Array, ...], GatherResidual]:
    """``all_gather(x) @ w`` for each w; and the gathered x, if the call keeps it."""
    return (_gather_matmul_keeping if call.keep_gathered else _gather_matmul)(x, ws, call)


def _gather_matmul_primal(x, ws, call: OpParams) -> tuple[tuple[jax.Array, ...], GatherResidual]:
    chosen = call.choose("all_gather_matmul", (x,) * len(ws), ws, keep_gathered=call.keep_gathered)

    def gather(x, ws):
        return chosen.all_gather_matmul(
            x,
            ws,
            call.axis_name,
            dimension=call.shard_dimension,
            transpose_w=call.transpose_w,
            keep_gathered=call.keep_gathered,
        )

    return gather_with_auto_axes(gather, x, ws, call.transpose_w)


def gather_with_auto_axes(gather: Callable, x, ws, transpose_w: bool = False):
    """``gather(x, ws)``, products and the gathered x, under explicit axes too."""

    def in_parts(x, ws):
        ys, gathered = gather(x, ws)
        return ys, *_parts(gathered)

    def specs():
        products = tuple(product_spec(x, w, transpose_w) for w in ws)
        return products, specs_like(x), PartitionSpec()

    ys, chunks, starts = with_auto_axes(in_parts, specs, x, ws)
    return ys, chunks if starts is None else ChunkedArray(chunks, starts)


def keeping_op(primal: Callable) -> ReverseMode:
    """The op whose products and gathered x are those of `primal`, as `_gather_matmul_primal`."""
    op = _custom_vjp(primal)

    def forward(x, ws, call: OpParams):
        x, ws = jax.tree.map(lambda x: x.value, (x, ws), is_leaf=lambda x: hasattr(x, "perturbed"))
        return _forward(op, x, ws, call)

    # A symbolic zero means that nothing else depends on the gathered array. JAX does not have them
    # in a shard_map without `jax.jit`, so only an op that keeps the gathered array asks for them.
    op.defvjp(forward, _gather_matmul_backward, symbolic_zeros=True)
    return op


def _forward(op: Callable, x, ws, call: OpParams):
    with call.suppress_recording():
        ys, gathered = op(x, ws, call)
    return (ys, gathered), (x, ws, gathered)


def _gather_matmul_backward(call: OpParams, residuals, cotangents):
    call = call.without_fp8("the program uses the gathered array elsewhere too")
    gradients = functools.partial(_gather_matmul_gradients, call)
    return with_auto_axes(gradients, lambda: specs_like(residuals[:2]), residuals, cotangents)


def _gather_matmul_gradients(call: OpParams, residuals, cotangents):
    x, ws, gathered = residuals
    dys, dgathered = cotangents
    dys = tuple(map(_instantiate, dys))
    dx, gathered = _input_gradient(call, x, ws, gathered, dys, dgathered)
    dws = chunked_array.weight_gradients(gathered, dys, dimension=call.shard_dimension)
    dws = tuple(dw.swapaxes(0, 1) if call.transpose_w else dw for dw in dws)
    return tie_with_barrier(gathered, dx, dws)


def _input_gradient(
    call: OpParams, x, ws, gathered: GatherResidual, dys, dgathered
) -> tuple[Any, Any]:
    """The gradient of x, and the gathered x: gathered again, unless the forward kept it."""
    transpose_w, dimension = not call.transpose_w, call.shard_dimension
    whole = _whole_cotangent(gathered, dgathered, dimension)
    if whole is not None:
        # The gathered x was used elsewhere too: one sum over devices of both cotangents.
        products = [matmul(dy, w, transpose_w) for dy, w in zip(dys, ws, strict=True)]
        partial = add(*products, whole)
        dx = psum_scatter(partial, call.axis_name, dimension)
        return dx, gathered
    attributes: dict[str, Any] = {"direction": "backward"}
    co_gathered = None
    if gathered is None:
        # Without the barrier, XLA would reuse the forward's gather and keep its result until now.
        co_gathered, dys = lax.optimization_barrier((x, dys))
        attributes["co_gathered"] = x.shape
    chosen = call.choose("matmul_reduce_scatter", dys, ws, **attributes)
    dx, again = chosen.matmul_reduce_scatter(
        dys,
        ws,
        call.axis_name,
        dimension=dimension,
        transpose_w=transpose_w,
        co_gathered=co_gathered,
    )
    return dx, again if gathered is None else gathered


_gather_matmul = _custom_vjp(_gather_matmul_primal)
_gather_matmul.defvjp(functools.partial(_forward, _gather_matmul), _gather_matmul_backward)
_gather_matmul_keeping = keeping_op(_gather_matmul_primal)


@_custom_vjp
def matmul_scatter(
    xs: tuple[jax.Array, ...], ws: tuple[jax.Array, ...], call: OpParams
) -> jax.Array:
    """``reduce_scatter(sum of x @ w)`` over pairs."""
    chosen = call.choose("matmul_reduce_scatter", xs, ws)

    def matmul_reduce_scatter(xs, ws):
        return chosen.matmul_reduce_scatter(
            xs, ws, call.axis_name, dimension=call.shard_dimension, transpose_w=call.transpose_w
        )[0]

    spec = lambda: product_spec(xs[0], ws[0], call.transpose_w)  # noqa: E731
    return with_auto_axes(matmul_reduce_scatter, spec, xs, ws)


def _matmul_scatter_gradients(call: OpParams, operands, dy):
    xs, ws = operands
    dimension, transpose_w = call.shard_dimension, call.transpose_w
    attributes = {"keep_gathered": True, "direction": "backward"}
    chosen = call.choose("all_gather_matmul", (dy,) * len(ws), ws, **attributes)
    dxs, gathered = chosen.all_gather_matmul(
        dy,
        ws,
        call.axis_name,
        dimension=dimension,
        transpose_w=not transpose_w,
        keep_gathered=True,
    )
    dws = [weight_gradient(x, gathered, dimension, transpose_w) for x in xs]
    return tie_with_barrier(gathered, tuple(dxs), tuple(dws))


matmul_scatter.define_gradients(_matmul_scatter_gradients)


@_custom_vjp
def matmul_all_reduce(
    xs: tuple[jax.Array, ...], ws: tuple[jax.Array, ...], call: OpParams
) -> jax.Array:
    """``psum(sum of x @ w)`` over pairs."""
    chosen = call.choose("matmul_all_reduce", xs, ws)

    def all_reduce(xs, ws):
        return chosen.matmul_all_reduce(xs, ws, call.axis_name)

    return with_auto_axes(all_reduce, lambda: product_spec(xs[0], ws[0], call.transpose_w), xs, ws)


def _matmul_all_reduce_gradients(call: OpParams, operands, dy):
    xs, ws = operands  # There is no communication that a matmul could hide.
    if tracks_varying_axes(call.axis_name):
        dy = vary_over(dy, varying_axes(xs[0]))
    else:
        dy = psum(dy, call.axis_name)
    dxs = tuple(matmul(dy, w, transpose_w=True) for w in ws)
    return dxs, tuple(contract_rows(x, dy) for x in xs)


matmul_all_reduce.define_gradients(_matmul_all_reduce_gradients)


def weight_gradient(x: Any, dy: Any, dimension: int | None, transpose_w: bool) -> jax.Array:
    """``xᵀ dy`` [K, N], or ``dyᵀ x`` [N, K] for transposed weights; either may be in chunks."""
    first, second = (dy, x) if transpose_w else (x, dy)
    return chunked_array.weight_gradients(first, (second,), dimension=dimension)[0]


def pvary_all(axis_name: str, *arrays: jax.Array) -> list[jax.Array]:
    """Types all arrays as varying over the axis and over every axis that one of them varies over.

    This happens outside the custom gradients, so that JAX sums the cotangent of a replicated
    operand.
    """
    axes = frozenset({axis_name}).union(*map(varying_axes, arrays))
    if not tracks_varying_axes(axis_name):
        return list(arrays)
    return [vary_over(array, axes) for array in arrays]


def _whole_cotangent(gathered: GatherResidual, cotangent: Any, dimension: int) -> jax.Array | None:
    """The cotangent of the kept array, as one array; None if it is zero."""
    chunks = cotangent.chunks if isinstance(gathered, ChunkedArray) else [cotangent]
    if gathered is None or all(map(_is_zero, chunks)):
        return None
    if not isinstance(gathered, ChunkedArray):
        return cotangent
    return ChunkedArray([*map(_instantiate, chunks)], gathered.starts).whole(dimension)


def tie_with_barrier(gathered: GatherResidual, *results: Any) -> tuple[Any, ...]:
    """Returns the results; if they were computed from chunks, no result is used before all exist.

    XLA postpones weight gradients, since nothing waits for them, and until then their chunks would
    occupy memory.
    """
    if not isinstance(gathered, ChunkedArray):
        return results
    return lax.optimization_barrier(results)


def _parts(gathered: GatherResidual) -> tuple[Any, Any]:
    """The chunks and their starts; or what is not a `ChunkedArray`, and None."""
    if isinstance(gathered, ChunkedArray):
        return gathered.chunks, gathered.starts
    return gathered, None


def _is_zero(value: Any) -> bool:
    return isinstance(value, SymbolicZero)


def _instantiate(value: Any) -> Any:
    """The cotangent as an array, also if it is symbolically zero."""
    return jnp.zeros(value.shape, value.dtype) if _is_zero(value) else value
