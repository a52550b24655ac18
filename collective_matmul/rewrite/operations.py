"""The ops in the forms that programs need: with w as it lies, and with what was gathered.

Shapes are those of `collective_matmul.implementations`; so are the names of the arguments. Their
gradients are those of `collective_matmul.ops`, and no results are named.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from collective_matmul.choose import Site, choose
from collective_matmul.choose.site import Op
from collective_matmul.choose.source import Source
from collective_matmul.implementations import IMPLEMENTATIONS
from collective_matmul.implementations.arithmetic import add, matmul
from collective_matmul.implementations.chunks import Gathered

Kept = jax.Array | Gathered | None


@dataclass(frozen=True)
class Call:
    """One op in a program.

    Attributes:
      axis_name: the mesh axis.
      dimension: gathered or scattered.
      implementation: requested, or None.
      transpose_w: whether weights are [N, K].
      keep_gathered: whether what is gathered is a result too.
      source: of the collective in the user's program.
    """

    axis_name: str
    dimension: int
    implementation: str | None
    transpose_w: bool = False
    keep_gathered: bool = False
    source: Source | None = field(default=None, compare=False)

    def choose(self, op: Op, xs: Sequence, ws: Sequence, **facts: Any) -> Any:
        """The implementation; `facts` are further attributes of the `Site`."""
        transpose_w = self.transpose_w != (facts.get("direction") == "backward")
        site = Site(
            op=op,
            operands=tuple(
                (x.shape, w.shape[::-1] if transpose_w else w.shape)
                for x, w in zip(xs, ws, strict=True)
            ),
            dtype=xs[0].dtype,
            axis_name=self.axis_name,
            axis_size=lax.axis_size(self.axis_name),
            source=self.source,
            **facts,
        )
        return IMPLEMENTATIONS[choose(site, self.implementation)]


# The types of `jax.custom_vjp` do not survive `functools.partial`.
_custom_vjp: Any = functools.partial(jax.custom_vjp, nondiff_argnums=(2,))


@_custom_vjp
def gather_matmul(
    x: jax.Array, ws: tuple[jax.Array, ...], call: Call
) -> tuple[tuple[jax.Array, ...], Kept]:
    """``all_gather(x) @ w`` for each w, and what was gathered if the call keeps it."""
    chosen = call.choose("all_gather_matmul", (x,) * len(ws), ws, keep_gathered=call.keep_gathered)
    return chosen.all_gather_matmul(
        x,
        ws,
        call.axis_name,
        dimension=call.dimension,
        transpose_w=call.transpose_w,
        keep_gathered=call.keep_gathered,
    )


def _gather_matmul_forward(x, ws, call: Call):
    x, ws = jax.tree.map(lambda primal: primal.value, (x, ws), is_leaf=_is_primal)
    ys, gathered = gather_matmul(x, ws, call)
    return (ys, gathered), (x, ws, gathered)


def _gather_matmul_backward(call: Call, residuals, cotangents):
    x, ws, gathered = residuals
    dys, dgathered = cotangents
    dys = tuple(map(_instantiate, dys))
    dx, gathered = _input_gradient(call, x, ws, gathered, dys, dgathered)
    chosen = _implementation_of(gathered)
    dws = chosen.weight_gradients(gathered, dys, dimension=call.dimension)
    return dx, tuple(dw.swapaxes(0, 1) if call.transpose_w else dw for dw in dws)


def _input_gradient(call: Call, x, ws, gathered: Kept, dys, dgathered) -> tuple[Any, Any]:
    """The gradient of x, and x gathered: again, unless it was kept."""
    transpose_w, dimension = not call.transpose_w, call.dimension
    whole = _whole_cotangent(gathered, dgathered, dimension)
    if whole is not None:
        # One sum over devices, as it was before: of all that depends on what was gathered.
        products = [matmul(dy, w, transpose_w) for dy, w in zip(dys, ws, strict=True)]
        partial = add(*products, whole)
        dx = lax.psum_scatter(partial, call.axis_name, scatter_dimension=dimension, tiled=True)
        return dx, gathered
    facts: dict[str, Any] = {"direction": "backward"}
    rider = None
    if gathered is None:
        # XLA would find the forward's gather of x again and keep its result until now.
        rider, dys = lax.optimization_barrier((x, dys))
        facts["rider"] = x.shape
    chosen = call.choose("matmul_reduce_scatter", dys, ws, **facts)
    dx, again = chosen.matmul_reduce_scatter(
        dys, ws, call.axis_name, dimension=dimension, transpose_w=transpose_w, rider=rider
    )
    return dx, again if gathered is None else gathered


gather_matmul.defvjp(_gather_matmul_forward, _gather_matmul_backward, symbolic_zeros=True)


@_custom_vjp
def matmul_scatter(xs: tuple[jax.Array, ...], ws: tuple[jax.Array, ...], call: Call) -> jax.Array:
    """``reduce_scatter(sum of x @ w)`` over pairs."""
    chosen = call.choose("matmul_reduce_scatter", xs, ws)
    return chosen.matmul_reduce_scatter(
        xs, ws, call.axis_name, dimension=call.dimension, transpose_w=call.transpose_w
    )[0]


def _matmul_scatter_forward(xs, ws, call: Call):
    return matmul_scatter(xs, ws, call), (xs, ws)


def _matmul_scatter_backward(call: Call, residuals, dy):
    xs, ws = residuals
    facts = {"keep_gathered": True, "direction": "backward"}
    chosen = call.choose("all_gather_matmul", (dy,) * len(ws), ws, **facts)
    dxs, gathered = chosen.all_gather_matmul(
        dy,
        ws,
        call.axis_name,
        dimension=call.dimension,
        transpose_w=not call.transpose_w,
        keep_gathered=True,
    )
    dws = [weight_gradient(x, gathered, call) for x in xs]
    return tuple(dxs), tuple(dws)


matmul_scatter.defvjp(_matmul_scatter_forward, _matmul_scatter_backward)


def weight_gradient(x: Any, dy: Any, call: Call) -> jax.Array:
    """``xᵀ dy``, or ``dyᵀ x`` if the call's weights are transposed; either may be in chunks."""
    first, second = (dy, x) if call.transpose_w else (x, dy)
    chunked = first if isinstance(first, Gathered) else second
    chosen = _implementation_of(chunked)
    return chosen.weight_gradients(first, (second,), dimension=call.dimension)[0]


def _whole_cotangent(gathered: Kept, cotangent: Any, dimension: int) -> jax.Array | None:
    """That of what was kept, as one array; None where it is zero."""
    chunks = cotangent.chunks if isinstance(gathered, Gathered) else [cotangent]
    if gathered is None or all(map(_is_zero, chunks)):
        return None
    if not isinstance(gathered, Gathered):
        return cotangent
    return Gathered([*map(_instantiate, chunks)], gathered.starts).whole(dimension)


def whole_of(gathered: Kept, dimension: int) -> jax.Array:
    """What was gathered as one array."""
    assert gathered is not None
    return gathered.whole(dimension) if isinstance(gathered, Gathered) else gathered


def _implementation_of(gathered: Kept) -> Any:
    """One that takes what was gathered as it is."""
    return IMPLEMENTATIONS["ring" if isinstance(gathered, Gathered) else "bulk"]


def _is_primal(value: Any) -> bool:
    return hasattr(value, "perturbed")


def _is_zero(value: Any) -> bool:
    return isinstance(value, SymbolicZero)


def _instantiate(value: Any) -> Any:
    """An array for a cotangent that is symbolically zero."""
    return jnp.zeros(value.shape, value.dtype) if _is_zero(value) else value
