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

from models.blocks.split_pullback import split_pullback
from models.parameters.use import ParameterUse, Tree, arrays_of, as_float32, as_varying

#: Parameters, and the weights of them that were gathered before, or None.
Source = tuple[Tree, Tree | None]
#: The activations between two blocks, of which the first array is the residual stream, and the
#: weights of the next one, if it has them already.
Carry = tuple[Tree, Tree]
#: ``carry, result = step(carry, number of the block, its kind)``.
Step = Callable[[Carry, Any, int], tuple[Carry, Tree]]


class BlockLoop(Protocol):
    """An order of execution of `count` blocks of one structure.

    Blocks may be of several kinds, which take turns: block n is of kind ``n % period``. They have
    the same parameters, and keep the same for the backward, and compute something else.
    """

    @property
    def count(self) -> int:
        """The number of blocks."""
        ...

    @property
    def period(self) -> int:
        """The number of kinds."""
        ...

    def take(self, blocks: Any, number: Any) -> Tree:
        """Block `number` of a collection of blocks."""
        ...

    def neighbour(self, number: Any, offset: int) -> Any | None:
        """The number of the block after (offset 1) or before (-1) one; None if there is none."""
        ...

    def applied(
        self, funs: Sequence[Callable], blocks: Any, keys: Any, x: Tree, *others: Any
    ) -> Tree:
        """``x = fun(block, x, *others, key)`` for each block, by the function of its kind, with
        JAX's own derivative. `keys` are random keys [count], or None."""
        ...

    def run(self, step: Step, carry: Carry) -> tuple[Carry, Any]:
        """Applies the step to each block.

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
      period: the number of kinds.
    """

    count: int
    period: int = 1

    def take(self, blocks: Sequence[Tree], number: int) -> Tree:
        """Block `number`."""
        return blocks[number]

    def neighbour(self, number: int, offset: int) -> int | None:
        """The number of a neighbour, or None."""
        return number + offset if 0 <= number + offset < self.count else None

    def applied(
        self, funs: Sequence[Callable], blocks: Sequence[Tree], keys: Any, x: Tree, *others: Any
    ) -> Tree:
        """``x = fun(block, x, *others, key)`` for each block, with JAX's own derivative."""
        funs = [jax.jit(fun) for fun in funs]
        for number, block in enumerate(blocks):
            key = None if keys is None else keys[number]
            x = funs[number % self.period](block, x, *others, key)
        return x

    def run(self, step: Step, carry: Carry) -> tuple[Carry, list[Tree]]:
        """Applies the step to each block."""
        results: list[Tree] = []
        for number in range(self.count):
            carry, result = step(carry, number, number % self.period)
            results.append(result)
        return carry, results

    def run_reversed(self, step: Step, carry: Carry, last: Tree) -> tuple[Carry, list[Tree], Tree]:
        """Applies the step to each block.

        Gradients of one block, or of `last`, are complete before the block after next begins: those
        of at most two are whole.
        """
        gradients = [last]
        for number in reversed(range(self.count)):
            (x, weights), own = step(carry, number, number % self.period)
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
      unroll: blocks per iteration; there are at least as many as kinds.
      period: the number of kinds, a divisor of `count`.
    """

    count: int
    unroll: int
    period: int = 1

    @property
    def _turns(self) -> tuple[int, int]:
        """The number of iterations with a block of each kind, and how many are unrolled."""
        return self.count // self.period, max(1, self.unroll // self.period)

    def _by_turns(self, blocks: Tree) -> Tree:
        """[count, ...] -> [turns, kinds, ...]; the same if there is one kind."""
        if self.period == 1:
            return blocks
        return jax.tree.map(lambda x: x.reshape(-1, self.period, *x.shape[1:]), blocks)

    def _of_kind(self, turn: Tree, kind: int) -> Tree:
        """A block of one turn."""
        return turn if self.period == 1 else jax.tree.map(lambda x: x[kind], turn)

    def take(self, blocks: Tree, number: jax.Array) -> Tree:
        """Block `number`, int32 []."""
        return jax.tree.map(
            functools.partial(lax.dynamic_index_in_dim, index=number, keepdims=False), blocks
        )

    def neighbour(self, number: jax.Array, offset: int) -> jax.Array:
        """The number of a neighbour, or of the block itself."""
        return jnp.clip(number + offset, 0, self.count - 1)

    def applied(
        self, funs: Sequence[Callable], blocks: Tree, keys: Any, x: Tree, *others: Any
    ) -> Tree:
        """``x = fun(block, x, *others, key)`` for each block, with JAX's own derivative."""

        def step(x: Tree, turn: tuple[Tree, Any]) -> tuple[Tree, None]:
            for kind, fun in enumerate(funs):
                block, key = self._of_kind(turn, kind)
                x = fun(block, x, *others, key)
            return x, None

        return lax.scan(step, x, self._by_turns((blocks, keys)), unroll=self._turns[1])[0]

    def run(self, step: Step, carry: Carry) -> tuple[Carry, Tree]:
        """Applies the step to each block.

        Results are written to memory that nothing has been written to. `lax.scan` fills it with
        zeros first: a pass over all that is kept for the backward.
        """
        traced = jax.make_jaxpr(step, static_argnums=2, return_shape=True)
        closed, (_, shapes) = traced(carry, jnp.int32(0), 0)
        structure = jax.tree.structure(shapes)
        avals = closed.out_avals[len(closed.out_avals) - structure.num_leaves :]
        whole = [
            as_varying(
                lax.empty((self.count, *aval.shape), aval.dtype), aval.manual_axis_type.varying
            )
            for aval in avals
        ]

        def one(turn: jax.Array, state: tuple[Carry, list[jax.Array]]) -> Any:
            carry, whole = state
            for kind in range(self.period):
                number = self._number(turn, kind)
                carry, results = step(carry, number, kind)
                pairs = zip(whole, jax.tree.leaves(results), strict=True)
                whole = [lax.dynamic_update_index_in_dim(a, x, number, 0) for a, x in pairs]
            return carry, whole

        turns, unroll = self._turns
        carry, whole = lax.fori_loop(0, turns, one, (carry, whole), unroll=unroll)
        return carry, jax.tree.unflatten(structure, whole)

    def run_reversed(self, step: Step, carry: Carry, last: Tree) -> tuple[Carry, Tree, Tree]:
        """Applies the step to each block. Gradients of `last` are complete before the loop."""
        x, last = _tied(carry[0], last)
        turns, unroll = self._turns

        def one(carry: Carry, turn: jax.Array) -> tuple[Carry, list[Tree]]:
            gradients = []
            for kind in reversed(range(self.period)):
                carry, own = step(carry, self._number(turn, kind), kind)
                gradients.append(own)
            return carry, gradients[::-1]

        carry = x, carry[1]
        carry, each = lax.scan(one, carry, jnp.arange(turns), reverse=True, unroll=unroll)
        if self.period == 1:
            return carry, each[0], last

        def whole(*kinds: jax.Array) -> jax.Array:
            return jnp.stack(kinds, 1).reshape(self.count, *kinds[0].shape[1:])

        return carry, jax.tree.map(whole, *each), last

    def _number(self, turn: jax.Array, kind: int) -> jax.Array:
        return turn if self.period == 1 else turn * self.period + kind


def apply_blocks(
    funs: Sequence[Callable[..., Tree]],
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
      funs: a function for each kind of block, traced once for all blocks of it.
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

        def block(kind: int, weights: Tree, x: Tree) -> tuple[Tree, tuple]:
            return funs[kind](weights, x, *others), ()

        y, last, _, _ = _forward(blocks, block, blocks.weights(0), x, (last, gathered[1]))
        return y, last

    def forward(
        parameters: Any, x: Tree, last: Tree, gathered: tuple, others: Tree
    ) -> tuple[tuple, Partial]:
        blocks = _Blocks(use, loop, parameters, gathered[0])
        weights = blocks.weights(0)
        splits = [split_pullback(fun, weights, x, *others) for fun in funs]

        def block(kind: int, weights: Tree, x: Tree) -> tuple[Tree, list[jax.Array]]:
            return splits[kind].forward(weights, x, *others)

        def pullback(kind: int, *arguments: Any) -> tuple[Tree, Tree]:
            return splits[kind].backward(*arguments)

        y, last, weights, kept = _forward(blocks, block, weights, x, (last, gathered[1]))

        def pull(blocks: _Blocks, weights: Tree, kept: Any, dy: Tree, d_last: Tree) -> tuple:
            d_last = None if d_last is None else use.gradients(d_last, whole=True)
            d_parameters, dx, d_last = _backward(blocks, pullback, weights, kept, dy, d_last)
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
    block: Callable[[int, Tree, Tree], tuple[Tree, Any]],
    weights: Tree,
    x: Tree,
    last: Source | tuple[None, None],
) -> tuple[Tree, Tree, Tree, Any]:
    """The result of the last block, the weights of `last` and of the last block, and what is
    kept."""
    use = blocks.use

    @functools.partial(jax.jit, static_argnums=0)
    def compute(kind: int, x: Tree, weights: Tree, source: Source | None) -> tuple[Carry, Any]:
        x, weights, following = _begin(use, x, weights, source)
        y, kept = block(kind, weights, x)
        return (y, following), kept

    def step(carry: Carry, number: Any, kind: int) -> tuple[Carry, Any]:
        nonlocal last
        x, weights = carry
        source = blocks.source(number, 1)
        if source is None:
            x, last = _tied_source(x, last)
        return compute(kind, x, weights, source)

    carry = x, (weights if use.gathers == "blocks" else ())
    (y, weights), kept = blocks.loop.run(step, carry)
    following = None if last[0] is None else use.weights(*last, whole=True)
    return y, following, weights, kept


def _backward(
    blocks: _Blocks,
    pullback: Callable[[int, Tree, Any, Tree], tuple[Tree, Tree]],
    weights: Tree,
    kept: Any,
    dy: Tree,
    d_last: Tree | None,
) -> tuple[Any, Tree, Tree | None]:
    """The gradients of the parameters, of the input of the first block, and of `last`."""

    @functools.partial(jax.jit, static_argnums=0)
    def compute(kind: int, dy: Tree, weights: Tree, source: Any, kept: Any) -> tuple[Carry, Tree]:
        dy, weights, following = _begin(blocks.use, dy, weights, source)
        gradients, dx = pullback(kind, weights, kept, dy)
        return (dx, following), blocks.use.gradients(gradients)

    def step(carry: Carry, number: Any, kind: int) -> tuple[Carry, Tree]:
        return compute(kind, *carry, blocks.source(number, -1), blocks.loop.take(kept, number))

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
