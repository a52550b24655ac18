"""`overlap`: a transformation that hides the communication of a function under its matmuls."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jax.interpreters.partial_eval import DynamicJaxprTracer

from collective_matmul.jaxprs.walks import Holds
from collective_matmul.jit.graph_functions import (
    GraphFunction,
    GraphNodesError,
    check_function,
    pure_function,
)
from collective_matmul.log import warn_once
from collective_matmul.ops.matmul import checks
from collective_matmul.ops.matmul.checks import Implementation
from collective_matmul.rewrite.find.placements import explicit_axes
from collective_matmul.rewrite.find.report import FoundSite, consider, table
from collective_matmul.rewrite.find.scoped_recipes import Fp8, scoped_recipes
from collective_matmul.rewrite.find.written_blocks import WrittenBlocks
from collective_matmul.rewrite.rewriter import Rewriter

#: Why a function has no sites, and what to do about it.
NOTHING_SHOWN = (
    "it enters no jax.shard_map, and no array in it is sharded over a mesh axis of type Explicit."
    " Over axes of type Auto, the compiler shards arrays and inserts collectives later, and the"
    " program shows neither. Make the mesh with jax.make_mesh(shape, names,"
    " axis_types=(jax.sharding.AxisType.Explicit,) * len(names)) and put the arguments on it; or"
    " write the communication with jax.shard_map; or give the model's linear layers to"
    " collective_matmul.layers.parallelize"
)


def overlap(
    fun: Callable,
    *,
    require: int | None = None,
    fp8: Fp8 = None,
    implementation: Implementation = None,
) -> Callable:
    """Transforms a function so that gathers and sums over devices overlap with their matmuls.

    For programs written with `jax.shard_map` and JAX's own collectives. The function is traced, and
    in every `shard_map` in it, at any depth, this library's ops replace::

        lax.all_gather(x, axis) @ w          also several matmuls with one gathered array
        lax.psum_scatter(x @ w, axis)        also of sums and differences of several matmuls
        lax.psum(x @ w, axis)                likewise

    For programs under `jax.jit` over mesh axes of type Explicit as well. Types of arrays show what
    is communicated there, and each site becomes a `shard_map` over its axis around the op::

        reshard(x, P(None)) @ w              gathers x, also where only the result's type says so
        jnp.dot(x, w, out_sharding=spec)     contracts a dimension that is sharded: the product is
                                             summed, and scattered where spec shards it

    Equations that commute with the collective may come between the two: casts, reshapes,
    transposes, scaling by constants, names for `jax.checkpoint`, barriers and sharding constraints.
    So may the boundary of a `jax.jit` or `jax.checkpoint`. A matmul that is the only user of the
    gathered array may contract the gathered dimension and may have batch dimensions.

    A weight that is gathered over a second axis first, as in fully sharded data parallelism, is
    gathered in the same loop, if only matmuls that are sites need it whole.

    The same ring provides the gathered array to its other users. Weight gradients, which contract
    its rows, take the chunks as they arrived, in one launch for all weights where the program
    allows. The chunks are joined only for users that need the whole array.

    The function may be differentiated before or after. Before, its own backward is rewritten;
    after, the gradients are those of the ops.

    Each matmul rounds its result to the dtype that the program rounds it to, once, and accumulates
    in float32. Half-precision arrays that are multiplied in float32 and rounded again, as by
    ``jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)`` and its gradients, are
    multiplied in half precision, which computes the same. Sums over devices keep their dtype. A
    product that is scaled by a constant and then summed is summed first. Any collective for which
    this cannot be shown to be safe is left alone; `collective_matmul.explain` says why.

    Args:
      fun: a function of pytrees of arrays. Flax nnx objects are treated as by `overlap_jit`.
        Arguments of other types are passed on unchanged. It may contain `jax.jit`, gradients,
        `jax.vmap` or `overlap`, and the result may be transformed by them.
      require: the minimum number of sites: gathers and sums that ops replace, as places in the
        program; one in a loop counts once. Sites are the same for all devices, also where the
        decision for these devices is to keep the program's own equations. Only a request for
        backends that need GPUs depends on the devices of the mesh.
      fp8: None, or the recipe by which operands of the sites are quantized to 8 bits, as the ops
        take it; or recipes by name, as ``{"feed_forward": "rowwise"}``, for sites whose collective
        is in a `jax.named_scope`, or in a function under `jax.jit`, of that name. The innermost
        counts, and may have None. Differentiate what `overlap` returns to get the recipe's
        gradients: those that the program already has are quantized like a forward pass, and its
        weight gradients are not. Einsums that are not matmuls of whole dimensions keep their dtype,
        and so does a gather whose array has other uses, such as a weight gradient, with
        "tensorwise"; `explain` says so.
      implementation: which backends execute the sites, as the ops take it; None chooses for each
        site. See `collective_matmul.ops.matmul.backends`. A site that none of them can execute is
        left alone, and a warning says why, once.

    Returns:
      A function with the same arguments and results. It traces `fun` whenever it is called;
      ``overlap_jit(overlap(fun))`` does so once for each shape.

    Raises:
      ValueError: when called, if there are fewer sites than `require`, with a table of the gathers
        and sums that are left alone, or if `fp8` names a scope that the function does not have; at
        once, for an invalid `require`, `fp8` or `implementation`.
    """
    check_function(fun)
    requested, recipes = checks.implementation(implementation), scoped_recipes(fp8)
    if require is not None and (type(require) is not int or require < 0):
        raise ValueError(
            f"require={require!r}: expected a number of sites, 0 or more, or None for any"
        )

    def replaced(fun: Callable, *args: Any, **kwargs: Any) -> Any:
        traced = _Traced(fun, args, kwargs)
        recipes.check(traced.program.jaxpr)
        rewriter = Rewriter(requested, recipes)
        program = rewriter.rewrite(traced.program)
        found = rewriter.found
        if not shows_communication(traced.program):
            warn_once(f"overlap changes nothing in {_name(fun)}: {NOTHING_SHOWN}")
        consider(found)
        _check(require, found, shows_communication(traced.program))
        return traced.call(program)

    @functools.wraps(fun)
    def overlapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return replaced(pure_function(fun), *args, **kwargs)
        except GraphNodesError:
            graph = GraphFunction(fun)
            return graph.call(functools.partial(replaced, graph.pure), args, kwargs)

    return overlapped


def find_sites(fun: Callable, *, implementation: Implementation = None) -> Callable:
    """Finds what `overlap` would replace in a function: ``find_sites(fun)(*args)``.

    The function is traced for the shapes of its arguments. It is neither compiled nor executed.

    Args:
      fun: as for `overlap`.
      implementation: as for `overlap`.

    Returns:
      A function that takes the arguments of `fun`, or their `jax.ShapeDtypeStruct`, and returns a
      list of every gather and sum over devices, in the order of the program.
    """
    requested = checks.implementation(implementation)

    def found(*args: Any, **kwargs: Any) -> list[FoundSite]:
        return sites_of(traced_program(fun, args, kwargs), requested)

    return found


def traced_program(fun: Callable, args: tuple, kwargs: dict) -> Any:
    """The closed jaxpr of a function of arrays and nnx objects. Other arguments are constants."""

    def program(fun: Callable, *args: Any, **kwargs: Any) -> Any:
        return _Traced(fun, args, kwargs).program

    try:
        return program(pure_function(fun), *args, **kwargs)
    except GraphNodesError:
        graph = GraphFunction(fun)
        return graph.use_split(functools.partial(program, graph.pure), args, kwargs)


def sites_of(program: Any, requested: tuple[str, ...] | None = None) -> list[FoundSite]:
    """The gathers and sums of a closed jaxpr, and what `overlap` would do about each."""
    return rewritten(program, requested).sites


class Rewritten(NamedTuple):
    """A closed jaxpr after `overlap`, and its sites.

    Attributes:
      program: the closed jaxpr with its sites replaced.
      sites: every gather and sum over devices of the jaxpr before, in the order of the program.
    """

    program: Any
    sites: list[FoundSite]


def rewritten(
    program: Any, requested: tuple[str, ...] | None = None, blocks: WrittenBlocks | None = None
) -> Rewritten:
    """Rewrites a closed jaxpr as `overlap` does.

    Args:
      program: the closed jaxpr.
      requested: names of backends, as `overlap` takes them.
      blocks: the hand-written blocks that are known from rewriting it before, as it is.
    """
    rewriter = Rewriter(requested, blocks=blocks)
    new = rewriter.rewrite(program)
    return Rewritten(new, rewriter.found)


_shows_devices = Holds(
    lambda equation: (
        equation.primitive.name == "shard_map" or next(explicit_axes(equation), None) is not None
    )
)


def shows_communication(program: Any) -> bool:
    """Whether a closed jaxpr shows what devices do.

    It has a shard_map or arrays that Explicit axes shard, at any depth, or a shard_map is around.
    """
    return bool(jax.sharding.get_abstract_mesh().manual_axes) or _shows_devices(program.jaxpr)


def _name(fun: Callable) -> str:
    return getattr(fun, "__qualname__", None) or textwrap.shorten(repr(fun), 80, placeholder=" …")


class _Traced:
    """A function traced for its arguments. Arrays are traced; other arguments are constants."""

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
            # Inside another trace, make it one call, so that the inside is not traced again. Not
            # where it is differentiated: JAX would trace forward and backward of a call separately.
            flat = jax.jit(functools.wraps(fun)(flat))
        self.program, shapes = jax.make_jaxpr(flat, return_shape=True)(*self._arrays)
        self._result = jax.tree.structure(shapes)

    def call(self, program: Any) -> Any:
        """Executes a program that replaces the traced one."""
        fun = jaxpr_as_fun(program)
        if not any(isinstance(array, Tracer) for array in self._arrays):
            # Without jit, a shard_map has no symbolic zeros, which rings that keep the gathered
            # array need.
            fun = jax.jit(fun)
        return jax.tree.unflatten(self._result, list(fun(*self._arrays)))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _check(require: int | None, found: list[FoundSite], in_shard_map: bool) -> None:
    alone = [site for site in found if not site.replaced]
    replaced = len(found) - len(alone)
    if require is None or replaced >= require:
        return
    if not in_shard_map:
        raise ValueError(f"require={require}: {NOTHING_SHOWN}")
    if not found:
        raise ValueError(
            f"require={require}: the function has no gathers and no sums over devices; require 0,"
            " or pass the function that communicates"
        )
    counted = (
        f"require={require}: only {replaced} of {len(found)} gathers and sums over devices were"
        " replaced"
    )
    if any(site.runs > 1 for site in found):
        counted += " (each counts once, however often a loop runs it)"
    if not alone:
        raise ValueError(f"{counted}; require at most {replaced}")
    fewer = f"require {replaced}, or " if replaced else ""
    raise ValueError(f"{counted}; {fewer}change what is left alone:\n\n{table(alone)}")
