"""Loops over blocks whose weights are made anew for the forward and for the backward.

Between the two, activations are kept and no weights. Where a `ParameterUse` gathers the weights of
blocks, it does so one block ahead: in the forward, the shards of the next block wait until this
block begins; in the backward, those of the block before. So a gather can run while one other block
is computed, and the weights of at most two blocks are whole. The last block of the forward is the
first of the backward, and its weights stay. In the backward, the gradients of a block are complete
before the block after next begins: XLA would otherwise postpone them, and keep what they need. They
become float32 after all loops, so that XLA casts them where they are read, not in passes of their
own.

Barriers bound this. A barrier binds only values that are used after it, so it gets what has to wait
and what it has to wait for, and both go on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from models.parameter_use import ParameterUse, Tree, arrays_of, as_float32, as_varying
from models.split_pullback import split_pullback

#: Parameters, and the weights of them that were gathered before, or None.
Source = tuple[Tree, Tree | None]
#: The activations between two blocks, of which the first array is the residual stream, and the
#: weights of the next one, if it has them already.
Carry = tuple[Tree, Tree]
Step = Callable[[Carry, Any], tuple[Carry, Tree]]


class BlockLoop(Protocol):
    """An order of execution of `count` blocks of one structure."""

    @property
    def count(self) -> int:
        """The number of blocks."""
        ...

    def take(self, blocks: Any, number: Any) -> Tree:
        """Block `number` of a collection of blocks."""
        ...

    def neighbour(self, number: Any, offset: int) -> Any | None:
        """The number of the block after (offset 1) or before (-1) one; None if there is none."""
        ...

    def applied(self, fun: Callable, blocks: Any, keys: Any, x: Tree, *others: Any) -> Tree:
        """``x = fun(block, x, *others, key)`` for each block, with JAX's own derivative. `keys` are
        random keys [count], or None."""
        ...

    def run(self, step: Step, carry: Carry) -> tuple[Carry, Any]:
        """Applies ``carry, result = step(carry, number)`` for each block.

        Returns:
          The last carry, and the collection of the results.
        """
        ...

    def run_reversed(self, step: Step, carry: Carry, last: Tree) -> tuple[Carry, Any, Tree]:
        """The same from the last block to the first. Results are gradients, as are those of `last`,
        which follows the blocks.

        Returns:
          The last carry, the collection of the results, and the gradients of `last`.
        """
        ...


@dataclass(frozen=True)
class Unrolled:
    """Blocks one after the other in one program. A collection of blocks is a list.

    Attributes:
      count: the number of blocks.
    """

    count: int

    def take(self, blocks: Sequence[Tree], number: int) -> Tree:
        """Block `number`."""
        return blocks[number]

    def neighbour(self, number: int, offset: int) -> int | None:
        """The number of a neighbour, or None."""
        return number + offset if 0 <= number + offset < self.count else None

    def applied(
        self, fun: Callable, blocks: Sequence[Tree], keys: Any, x: Tree, *others: Any
    ) -> Tree:
        """``x = fun(block, x, *others, key)`` for each block, with JAX's own derivative."""
        fun = jax.jit(fun)
        for number, block in enumerate(blocks):
            x = fun(block, x, *others, None if keys is None else keys[number])
        return x

    def run(self, step: Step, carry: Carry) -> tuple[Carry, list[Tree]]:
        """Applies the step to each block."""
        results: list[Tree] = []
        for number in range(self.count):
            carry, result = step(carry, number)
            results.append(result)
        return carry, results

    def run_reversed(self, step: Step, carry: Carry, last: Tree) -> tuple[Carry, list[Tree], Tree]:
        """Applies the step to each block.

        Gradients of one block, or of `last`, are complete before the block after next begins: those
        of at most two are whole.
        """
        gradients = [last]
        for number in reversed(range(self.count)):
            (x, weights), own = step(carry, number)
            x, gradients[-1] = _tied(x, gradients[-1])
            gradients.append(own)
            carry = x, weights
        return carry, gradients[:0:-1], gradients[0]


@dataclass(frozen=True)
class Scanned:
    """Blocks in a loop of the program. A collection of blocks is a tree of arrays [count, ...].

    A loop does not tell its first and last block from others, so these are their own neighbours,
    whose weights are then gathered once more.

    Attributes:
      count: the number of blocks.
      unroll: blocks per iteration.
    """

    count: int
    unroll: int

    def take(self, blocks: Tree, number: jax.Array) -> Tree:
        """Block `number`, int32 []."""
        return jax.tree.map(
            functools.partial(lax.dynamic_index_in_dim, index=number, keepdims=False), blocks
        )

    def neighbour(self, number: jax.Array, offset: int) -> jax.Array:
        """The number of a neighbour, or of the block itself."""
        return jnp.clip(number + offset, 0, self.count - 1)

    def applied(self, fun: Callable, blocks: Tree, keys: Any, x: Tree, *others: Any) -> Tree:
        """``x = fun(block, x, *others, key)`` for each block, with JAX's own derivative."""

        def step(x: Tree, own: tuple[Tree, Any]) -> tuple[Tree, None]:
            block, key = own
            return fun(block, x, *others, key), None

        return lax.scan(step, x, (blocks, keys), unroll=self.unroll)[0]

    def run(self, step: Step, carry: Carry) -> tuple[Carry, Tree]:
        """Applies the step to each block.

        Results are written to memory that nothing has been written to. `lax.scan` fills it with
        zeros first: a pass over all that is kept for the backward.
        """
        closed, (_, shapes) = jax.make_jaxpr(step, return_shape=True)(carry, jnp.int32(0))
        structure = jax.tree.structure(shapes)
        avals = closed.out_avals[len(closed.out_avals) - structure.num_leaves :]
        whole = [
            as_varying(
                lax.empty((self.count, *aval.shape), aval.dtype), aval.manual_axis_type.varying
            )
            for aval in avals
        ]

        def one(number: jax.Array, state: tuple[Carry, list[jax.Array]]) -> Any:
            carry, whole = state
            carry, results = step(carry, number)
            pairs = zip(whole, jax.tree.leaves(results), strict=True)
            return carry, [lax.dynamic_update_index_in_dim(a, x, number, 0) for a, x in pairs]

        state = carry, whole
        carry, whole = lax.fori_loop(0, self.count, one, state, unroll=self.unroll)
        return carry, jax.tree.unflatten(structure, whole)

    def run_reversed(self, step: Step, carry: Carry, last: Tree) -> tuple[Carry, Tree, Tree]:
        """Applies the step to each block. Gradients of `last` are complete before the loop."""
        x, last = _tied(carry[0], last)
        numbers = jnp.arange(self.count)
        carry, gradients = lax.scan(step, (x, carry[1]), numbers, reverse=True, unroll=self.unroll)
        return carry, gradients, last


def apply_blocks(
    fun: Callable[..., Tree],
    use: ParameterUse,
    loop: BlockLoop,
    parameters: Any,
    gathered: Any | None,
    x: Tree,
    *others: Tree,
    last: Tree | None = None,
    gathered_last: Tree | None = None,
) -> tuple[Tree, Tree]:
    """Applies ``x = fun(use.weights(own parameters), x, *others)`` for each block.

    Args:
      fun: traced once for all blocks.
      use: what makes weights of parameters.
      loop: the order of execution.
      parameters: the parameters of the blocks, a collection as the loop has it.
      gathered: weights that were gathered before, a collection too, or None. Not differentiated.
      x: the input of the first block.
      *others: not differentiated.
      last: parameters of what follows the blocks, if anything does.
      gathered_last: its weights that were gathered before, or None. Not differentiated.

    Returns:
      The result of the last block, and the whole weights of `last`. In an unrolled loop they are
      gathered while the last block is computed.
    """

    @jax.custom_vjp
    def apply(parameters: Any, x: Tree, last: Tree, gathered: tuple, others: Tree) -> tuple:
        blocks = _Blocks(use, loop, parameters, gathered[0])

        def block(weights: Tree, x: Tree) -> tuple[Tree, tuple]:
            return fun(weights, x, *others), ()

        y, last, _, _ = _forward(blocks, block, blocks.weights(0), x, (last, gathered[1]))
        return y, last

    def forward(
        parameters: Any, x: Tree, last: Tree, gathered: tuple, others: Tree
    ) -> tuple[tuple, Partial]:
        blocks = _Blocks(use, loop, parameters, gathered[0])
        weights = blocks.weights(0)
        split = split_pullback(fun, weights, x, *others)

        def block(weights: Tree, x: Tree) -> tuple[Tree, list[jax.Array]]:
            return split.forward(weights, x, *others)

        y, last, weights, kept = _forward(blocks, block, weights, x, (last, gathered[1]))

        def pull(blocks: _Blocks, weights: Tree, kept: Any, dy: Tree, d_last: Tree) -> tuple:
            d_last = None if d_last is None else use.gradients(d_last, whole=True)
            d_parameters, dx, d_last = _backward(blocks, split.backward, weights, kept, dy, d_last)
            return d_parameters, dx, d_last, None, None

        return (y, last), Partial(pull, blocks, weights, kept)

    def backward(pull: Partial, gradients: tuple) -> tuple:
        return pull(*gradients)

    apply.defvjp(forward, backward)
    return apply(parameters, x, last, (gathered, gathered_last), others)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("parameters", "gathered"),
    meta_fields=("use", "loop"),
)
@dataclass(frozen=True)
class _Blocks:
    """The parameters of blocks, and how weights are made of them."""

    use: ParameterUse
    loop: BlockLoop
    parameters: Any
    gathered: Any | None

    def take(self, number: Any) -> Source:
        """The parameters of a block, and its weights that were gathered before."""
        take = self.loop.take
        gathered = None if self.gathered is None else take(self.gathered, number)
        return take(self.parameters, number), gathered

    def weights(self, number: int) -> Tree:
        """The weights of a block."""
        return self.use.weights(*self.take(number))

    def source(self, number: Any, offset: int) -> Source | None:
        """What weights are made of while block `number` is computed: the parameters of the next
        block, or its own where they are not gathered. None if there is no next block."""
        source = self.loop.neighbour(number, offset) if self.use.gathers == "blocks" else number
        return None if source is None else self.take(source)


def _begin(
    use: ParameterUse, x: Tree, weights: Tree, source: Source | None
) -> tuple[Tree, Tree, Tree]:
    """x, the weights of a block, and those that the next one will find."""
    if source is None:
        return x, weights, weights
    parameters, gathered = source
    if use.gathers != "blocks":
        return x, use.weights(parameters, gathered), ()
    x, source = _tied_source(x, (_typed_as(weights, parameters), gathered))
    return x, weights, use.weights(*source)


def _forward(
    blocks: _Blocks,
    block: Callable[[Tree, Tree], tuple[Tree, Any]],
    weights: Tree,
    x: Tree,
    last: Source | tuple[None, None],
) -> tuple[Tree, Tree, Tree, Any]:
    """The result of the last block, the weights of `last` and of the last block, and what is
    kept."""
    use = blocks.use

    @jax.jit
    def compute(x: Tree, weights: Tree, source: Source | None) -> tuple[Carry, Any]:
        x, weights, following = _begin(use, x, weights, source)
        y, kept = block(weights, x)
        return (y, following), kept

    def step(carry: Carry, number: Any) -> tuple[Carry, Any]:
        nonlocal last
        x, weights = carry
        source = blocks.source(number, 1)
        if source is None:
            x, last = _tied_source(x, last)
        return compute(x, weights, source)

    carry = x, (weights if use.gathers == "blocks" else ())
    (y, weights), kept = blocks.loop.run(step, carry)
    following = None if last[0] is None else use.weights(*last, whole=True)
    return y, following, weights, kept


def _backward(
    blocks: _Blocks,
    pullback: Callable[[Tree, Any, Tree], tuple[Tree, Tree]],
    weights: Tree,
    kept: Any,
    dy: Tree,
    d_last: Tree | None,
) -> tuple[Any, Tree, Tree | None]:
    """The gradients of the parameters, of the input of the first block, and of `last`."""

    @jax.jit
    def compute(dy: Tree, weights: Tree, source: Any, kept: Any) -> tuple[Carry, Tree]:
        dy, weights, following = _begin(blocks.use, dy, weights, source)
        gradients, dx = pullback(weights, kept, dy)
        return (dx, following), blocks.use.gradients(gradients)

    def step(carry: Carry, number: Any) -> tuple[Carry, Tree]:
        return compute(*carry, blocks.source(number, -1), blocks.loop.take(kept, number))

    (dx, _), gradients, d_last = blocks.loop.run_reversed(step, (dy, weights), d_last)
    return as_float32(gradients), dx, as_float32(d_last)


def _typed_as(weights: Tree, parameters: Tree) -> Tree:
    """Parameters, typed as varying over the mesh axes over which weights made of them vary."""

    def typed(weight: jax.Array, parameter: jax.Array) -> jax.Array:
        return as_varying(parameter, jax.typeof(weight).manual_axis_type.varying)

    return jax.tree.map(typed, arrays_of(weights), parameters)


def _tied_source(x: Tree, source: Source) -> tuple[Tree, Source]:
    """The same, where x and what weights are made of wait for each other."""
    parameters, gathered = source
    # Copies have no gradients, whose types would have to stay.
    axes = _type_of(x).varying
    return _tied(x, (parameters, jax.tree.map(lambda leaf: as_varying(leaf, axes), gathered)))


def _tied(x: Tree, tree: Tree) -> tuple[Tree, Tree]:
    """The same, where x and the matrices of a tree wait for each other. Vectors are small: their
    sums may be collected."""
    leaves, structure = jax.tree.flatten(tree)
    kind = _type_of(x)
    # In jax 0.10, a barrier would give all the same type.
    places = [
        place
        for place, leaf in enumerate(leaves)
        if leaf.ndim > 1
        and (jax.__version_info__ >= (0, 11) or jax.typeof(leaf).manual_axis_type == kind)
    ]
    x, waiting = lax.optimization_barrier((x, [leaves[place] for place in places]))
    for place, leaf in zip(places, waiting, strict=True):
        leaves[place] = leaf
    return x, jax.tree.unflatten(structure, leaves)


def _type_of(x: Tree) -> Any:
    """How the activations between blocks vary over mesh axes."""
    return jax.typeof(jax.tree.leaves(x)[0]).manual_axis_type
