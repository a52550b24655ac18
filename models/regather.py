"""Blocks whose weights are gathered for the forward, freed, and gathered again for the backward.

A block is a function of weights and activations. `jax.checkpoint` cannot keep all activations and
no weights, since its policies see single operations and not what they are computed from.
`split_pullback` looks at what the backward needs: what depends on weights alone is computed again.

Barriers bound when weights are gathered. In the forward, the shards of a block wait until the block
before it begins; in the backward, until the block after it begins. So a gather can run while one
other block is computed, and the weights of at most two blocks are whole. A barrier binds only
values that are used after it, so it gets what has to wait and what it has to wait for, and both go
on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun
from jax.tree_util import Partial

_CALLS = ("jit", "pjit")

Tree = Any
Gather = Callable[[Tree], Tree]


def apply_blocks(
    fun: Callable[..., jax.Array],
    gather: Gather,
    blocks: Sequence[Tree],
    x: jax.Array,
    *others: Tree,
    last: Tree,
) -> tuple[jax.Array, Tree]:
    """Applies ``x = fun(gather(shards), x, *others)`` for the shards of each block.

    Args:
      fun: traced once for all blocks.
      gather: shards -> weights. Its transpose scatters gradients.
      blocks: the shards of each block, trees of one structure.
      x: the input of the first block.
      *others: not differentiated.
      last: shards of what follows the blocks.

    Returns:
      The result of the last block, and `last`, which waits until that block begins.
    """
    block = _make_block(fun, gather)

    @jax.jit
    def apply(*arguments: Any) -> tuple:
        return block(*arguments)  # JAX names this line as the source of what is in a block.

    # Ends of the stack have no neighbour. Their own shards stand in, so that all blocks are alike.
    earlier, waiting = lax.stop_gradient(blocks[0]), blocks[0]
    for later in blocks[1:]:
        x, earlier, waiting = apply(waiting, x, earlier, later, others)
    x, last = _tied(x, last)
    x, earlier, _ = apply(waiting, x, earlier, lax.stop_gradient(blocks[-1]), others)
    return _end_blocks(x, earlier), last


def _make_block(fun: Callable[..., jax.Array], gather: Gather) -> Callable[..., tuple]:
    """The function of one block: ``(own, x, earlier, later, others) -> (y, own, later)``.

    `own`, `earlier` and `later` are the shards of this block, of the one before and of the one
    after. `later` returns tied to x. In the backward, the shards `own` arrive in place of their
    gradient, tied to what the block after received; and `earlier` is handed on likewise.
    """

    @jax.custom_vjp
    def block(own: Tree, x: jax.Array, earlier: Tree, later: Tree, others: Tree) -> tuple:
        del earlier
        x, later = _tied(x, later)
        return fun(gather(own), x, *others), own, later

    def forward(own: Tree, x: jax.Array, earlier: Tree, later: Tree, others: Tree) -> tuple:
        x, later = _tied(x, later)
        weights = gather(own)
        split = split_pullback(fun, weights, x, *others)
        y, kept = split.forward(weights, x, *others)

        def pull(kept: list[jax.Array], earlier: Tree, gradients: tuple) -> tuple:
            dy, own, d_later = gradients
            dy, earlier = _tied(dy, earlier)
            weights, scatter = jax.vjp(gather, own)
            d_weights, dx = split.backward(weights, kept, dy)
            # Gradients of at most two blocks are whole.
            dx, d_later = _tied(dx, d_later)
            return *scatter(d_weights), dx, earlier, d_later, None

        return (y, own, later), Partial(pull, kept, earlier)

    def backward(pull: Partial, gradients: tuple) -> tuple:
        return pull(gradients)

    block.defvjp(forward, backward)
    return block


@jax.custom_vjp
def _end_blocks(x: jax.Array, own: Tree) -> jax.Array:
    """x. In the backward, hands its shards to the last block."""
    del own
    return x


def _end_forward(x: jax.Array, own: Tree) -> tuple[jax.Array, Tree]:
    return x, own


def _end_backward(own: Tree, gradient: jax.Array) -> tuple[jax.Array, Tree]:
    return _tied(gradient, own)


_end_blocks.defvjp(_end_forward, _end_backward)


def _tied(x: jax.Array, shards: Tree) -> tuple[jax.Array, Tree]:
    """The same, where x and the shards wait for each other.

    What varies over other axes than x, as vectors do, is not sharded and waits for nothing: in jax
    0.10 a barrier would change its type.
    """
    leaves, structure = jax.tree.flatten(shards)
    varying = jax.typeof(x).manual_axis_type
    places = [i for i, leaf in enumerate(leaves) if jax.typeof(leaf).manual_axis_type == varying]
    x, waiting = lax.optimization_barrier((x, [leaves[place] for place in places]))
    for place, leaf in zip(places, waiting, strict=True):
        leaves[place] = leaf
    return x, jax.tree.unflatten(structure, leaves)


class SplitPullback(NamedTuple):
    """A function and its gradient, in two programs that share no array made of weights alone.

    Attributes:
      forward: ``(weights, x, *others) -> (y, kept)``; what is kept depends on more than weights.
      backward: ``(weights, kept, dy) -> (d_weights, dx)``.
    """

    forward: Callable[..., tuple[jax.Array, list[jax.Array]]]
    backward: Callable[..., tuple[Tree, jax.Array]]


def split_pullback(
    fun: Callable[..., jax.Array], weights: Tree, x: jax.Array, *others: Tree
) -> SplitPullback:
    """Traces a function and its gradient with respect to weights and x."""

    def both(weights: Tree, x: jax.Array, *others: Tree) -> Any:
        return jax.vjp(lambda weights, x: fun(weights, x, *others), weights, x)

    arguments = (weights, x, *others)
    closed, (_, pullback) = jax.make_jaxpr(both, return_shape=True)(*arguments)
    closed = jax.make_jaxpr(_without_calls(closed))(*jax.tree.leaves(arguments))
    jaxpr, (result, *residuals) = closed.jaxpr, closed.jaxpr.outvars
    structure = jax.tree.structure(pullback)
    own = jaxpr.invars[: len(jax.tree.leaves(weights))]
    dependent = dependents(jaxpr, [*jaxpr.constvars, *jaxpr.invars[len(own) :]])
    kept = list(dict.fromkeys(v for v in residuals if isinstance(v, Var) and v in dependent))
    remade = [v for v in residuals if not isinstance(v, Var) or v not in dependent]
    first = jaxpr_as_fun(closed.replace(jaxpr=jaxpr.replace(outvars=[result, *kept])))
    again = jaxpr_as_fun(
        ClosedJaxpr(
            jaxpr.replace(
                constvars=[], invars=own, outvars=remade, eqns=_needed(jaxpr, remade, dependent)
            ),
            [],
        )
    )

    def forward(*arguments: Tree) -> tuple[jax.Array, list[jax.Array]]:
        y, *saved = first(*jax.tree.leaves(arguments))
        return y, saved

    def backward(
        weights: Tree, saved: Sequence[jax.Array], dy: jax.Array
    ) -> tuple[Tree, jax.Array]:
        values = dict(zip(kept, saved, strict=True))
        made = iter(again(*jax.tree.leaves(weights)))
        leaves = [
            values[v] if isinstance(v, Var) and v in dependent else next(made) for v in residuals
        ]
        return jax.tree.unflatten(structure, leaves)(dy)

    return SplitPullback(forward, backward)


def dependents(jaxpr: Jaxpr, sources: Iterable[Var]) -> set[Var]:
    """The variables of a jaxpr that depend on any of `sources`, with these.

    Looks into functions that are jitted. What goes through a barrier depends on what it was. Of
    other equations, all results depend on all operands.
    """
    found = set(sources)
    for equation in jaxpr.eqns:
        is_dependent = [isinstance(v, Var) and v in found for v in equation.invars]
        if equation.primitive.name in _CALLS:
            inner = equation.params["jaxpr"].jaxpr
            within = dependents(inner, itertools.compress(inner.invars, is_dependent))
            pairs = zip(equation.outvars, inner.outvars, strict=True)
            found.update(v for v, own in pairs if isinstance(own, Var) and own in within)
        elif equation.primitive.name == "optimization_barrier":
            found.update(itertools.compress(equation.outvars, is_dependent))
        elif any(is_dependent):
            found.update(equation.outvars)
    return found


def _without_calls(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """A function that evaluates a jaxpr, and those of functions that are jitted inside, one by one:
    a call may return both what depends on weights alone and what does not."""

    def evaluate(*arguments: Any) -> list[Any]:
        jaxpr = closed.jaxpr
        inputs = zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments], strict=True)
        values = dict(inputs)

        def value(v: Var | Literal) -> Any:
            return v.val if isinstance(v, Literal) else values[v]

        for equation in jaxpr.eqns:
            if equation.primitive.name in _CALLS:
                called = _without_calls(equation.params["jaxpr"])
                results = called(*map(value, equation.invars))
            else:
                read = list({v: None for v in equation.invars if isinstance(v, Var)})
                alone = jaxpr.replace(
                    constvars=[], invars=read, outvars=equation.outvars, eqns=[equation]
                )
                results = jaxpr_as_fun(ClosedJaxpr(alone, []))(*map(value, read))
            values.update(zip(equation.outvars, results, strict=True))
        return [value(v) for v in jaxpr.outvars]

    return evaluate


def _needed(jaxpr: Jaxpr, results: Sequence[Var | Literal], without: set[Var]) -> list[Any]:
    """The equations that results need which do not depend on the variables `without`."""
    needed = {v for v in results if isinstance(v, Var)}
    equations = []
    for equation in reversed(jaxpr.eqns):
        if any(v in needed for v in equation.outvars) and without.isdisjoint(equation.outvars):
            needed.update(v for v in equation.invars if isinstance(v, Var))
            equations.append(equation)
    return equations[::-1]
