"""`overlap`: a function whose gathers and sums over devices hide under their matmuls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jax.interpreters.partial_eval import DynamicJaxprTracer

from collective_matmul import checks
from collective_matmul.rewrite.report import FoundSite, table
from collective_matmul.rewrite.rewriter import Rewriter


def overlap(
    fun: Callable, *, require: int | None = None, implementation: str | None = None
) -> Callable:
    """The same function, with its gathers and sums over devices hidden under their matmuls.

    For programs written with `jax.shard_map` and JAX's own collectives. The function is traced, and
    in every `shard_map` in it, at any depth, these are replaced by this library's ops::

        lax.all_gather(x, axis) @ w          also several matmuls of what one gather gathered
        lax.psum_scatter(x @ w, axis)        also of a sum of several matmuls
        lax.psum(x @ w, axis)

    Between the two may stand what commutes with the collective: casts, reshapes, transposes,
    scaling by constants, names for `jax.checkpoint`, barriers, sharding constraints; or the border
    of a `jax.jit` or `jax.checkpoint`. A matmul that alone uses what is gathered may contract the
    gathered dimension, and may have batch dimensions. What else needs the gathered array gets it
    from the same ring: weight gradients, which contract its rows, take the chunks as they came, one
    launch for all weights where the program allows, and only for others are they joined. Programs
    may be differentiated before, so that their own backwards are rewritten, or afterwards: then the
    gradients are those of the ops.

    Each matmul keeps the dtypes of its operands and result, and accumulates in float32; sums
    between devices are in the same dtype as before. A product that is scaled by a constant and then
    summed is summed first. What cannot be shown to be safe is left alone: `explain` says why.

    Args:
      fun: a function of arrays, in pytrees; arguments of other types are handed on as they are. It
        may be compiled, differentiated or batched, inside or outside, and overlapped already.
      require: the least number of gathers and sums that must be replaced.
      implementation: as the ops take it; None chooses for each site.

    Returns:
      A function of the same arguments and results. It traces `fun` whenever it is called:
      ``overlap_jit(overlap(fun))`` does so once for each shape.

    Raises:
      ValueError: when called, if fewer sites than `require` were replaced, with a table of them;
        or for a `require` or `implementation` that cannot be.
    """
    checks.implementation(implementation)
    if require is not None and (type(require) is not int or require < 0):
        raise ValueError(
            f"require={require!r}: expected a number of sites, 0 or more, or None for any"
        )

    @functools.wraps(fun)
    def overlapped(*args: Any, **kwargs: Any) -> Any:
        traced = _Traced(fun, args, kwargs)
        rewriter = Rewriter(implementation)
        program = rewriter.rewritten(traced.program)
        _check(require, rewriter.found)
        return traced.call(program)

    return overlapped


def find_sites(fun: Callable, *, implementation: str | None = None) -> Callable:
    """What `overlap` finds in a function, and what it does about it: ``find_sites(fun)(*args)``.

    The function is traced for the shapes of its arguments, and neither compiled nor run.

    Args:
      fun: as `overlap` takes it.
      implementation: as `overlap` takes it.

    Returns:
      A function that takes the arguments of `fun`, or their `jax.ShapeDtypeStruct`, and returns
      every gather and sum over devices, in the order of the program.
    """
    checks.implementation(implementation)

    def found(*args: Any, **kwargs: Any) -> list[FoundSite]:
        rewriter = Rewriter(implementation)
        rewriter.rewritten(_Traced(fun, args, kwargs).program)
        return rewriter.found

    return found


class _Traced:
    """A function traced for its arguments: arrays are traced, all else is as it is."""

    def __init__(self, fun: Callable, args: tuple, kwargs: dict):
        leaves, treedef = jax.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

        def flat(*arrays: Any) -> Any:
            filled = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            args, kwargs = jax.tree.unflatten(treedef, filled)
            return fun(*args, **kwargs)

        self._arrays = [leaves[i] for i in places]
        tracers = [array for array in self._arrays if isinstance(array, Tracer)]
        if tracers and all(isinstance(tracer, DynamicJaxprTracer) for tracer in tracers):
            # A call in the program around this one, which need not trace what is inside again. Not
            # where it is differentiated: of a call, JAX would trace both gradients on their own.
            flat = jax.jit(functools.wraps(fun)(flat))
        self.program, shapes = jax.make_jaxpr(flat, return_shape=True)(*self._arrays)
        self._result = jax.tree.structure(shapes)

    def call(self, program: Any) -> Any:
        """Carries out a program that has taken the place of the one traced."""
        fun = jaxpr_as_fun(program)
        if not any(isinstance(array, Tracer) for array in self._arrays):
            # Without jit, JAX knows no symbolic zeros in a shard_map, which a ring needs that keeps
            # what it gathers.
            fun = jax.jit(fun)
        return jax.tree.unflatten(self._result, list(fun(*self._arrays)))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _check(require: int | None, found: list[FoundSite]) -> None:
    replaced = sum(site.replaced for site in found)
    if require is not None and replaced < require:
        raise ValueError(
            f"require={require}: only {replaced} gathers and sums over devices were replaced;"
            f" see why the others were left alone, or require fewer\n{table(found)}"
        )
