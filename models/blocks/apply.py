"""Applies blocks whose weights are made anew for the forward and for the backward.

A block says three things to the loop that runs it:

- what it needs: its parameters, and how weights are made of them (`_Blocks.needed`). Where a
  `ParameterUse` gathers the weights of blocks, it does so one block ahead: in the forward, the
  shards of the next block wait until this block begins; in the backward, those of the block before.
  So a gather can run while one other block is computed, and the weights of at most two blocks are
  whole. The last block of the forward is the first of the backward, and its weights stay.
- what it keeps for the backward: activations and no weights (`split_pullback`).
- what waits: the gradients of its parameters (`_Blocks.gradients`), which are complete before the
  block after next begins. They become float32 after all loops, so that XLA casts them where they
  are read, not in passes of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import Partial

from collective_matmul.jaxprs import split_pullback
from models.blocks.barriers import tied, varying_axes
from models.blocks.loop import BlockLoop, Carry
from models.parameters.use import ParameterUse, Tree, arrays_of, as_float32, as_varying

#: Parameters, and the weights of them that were gathered before, or None.
Source = tuple[Tree, Tree | None]
#: By the kind of a block, ``(weights, x) -> (y, kept)``.
Forward = Callable[[int, Tree, Tree], tuple[Tree, Any]]
#: By the kind of a block, ``(weights, kept, dy) -> (d_weights, dx)``.
Pullback = Callable[[int, Tree, Any, Tree], tuple[Tree, Tree]]


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

        def pullback(kind: int, weights: Tree, kept: Any, dy: Tree) -> tuple[Tree, Tree]:
            return splits[kind].backward(weights, kept, dy)

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
    """Weights that blocks need, and gradients of theirs that wait.

    Attributes:
      use: what makes weights of parameters, and gradients of parameters of those of weights.
      loop: the order of execution.
      parameters: a collection as the loop has it.
      gathered: weights that were gathered before, or None.
    """

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

    def needed(self, number: Any, offset: int) -> Source | None:
        """The parameters of which weights are made while block `number` is computed.

        They are those of its neighbour at `offset`, or its own where they are not gathered for
        blocks. None if it has no neighbour there.
        """
        source = self.loop.neighbour(number, offset) if self.use.gathers == "blocks" else number
        return None if source is None else self.take(source)

    def begin(self, x: Tree, weights: Tree, source: Source | None) -> tuple[Tree, Tree, Tree]:
        """x, the weights of a block, and those that the next one will find.

        Args:
          x: what the block computes with; the gather of other weights begins when it is there.
          weights: those of the block, if they were gathered while another one was computed.
          source: `needed` of the block.
        """
        if source is None:
            return x, weights, weights
        parameters, gathered = source
        if self.use.gathers != "blocks":
            return x, self.use.weights(parameters, gathered), ()
        x, source = _tied_source(x, (_typed_as(weights, parameters), gathered))
        return x, weights, self.use.weights(*source)

    def gradients(self, d_weights: Tree) -> Tree:
        """The gradients of a block's parameters. The loop ties them to the next blocks."""
        return self.use.gradients(d_weights)


def _forward(
    blocks: _Blocks, block: Forward, weights: Tree, x: Tree, last: Source | tuple[None, None]
) -> tuple[Tree, Tree, Tree, Any]:
    """The result of the last block, the weights of `last` and of the last block, and what is
    kept."""
    use = blocks.use

    @functools.partial(jax.jit, static_argnums=0)
    def compute(kind: int, x: Tree, weights: Tree, source: Source | None) -> tuple[Carry, Any]:
        x, weights, following = blocks.begin(x, weights, source)
        y, kept = block(kind, weights, x)
        return (y, following), kept

    def step(carry: Carry, number: Any, kind: int) -> tuple[Carry, Any]:
        nonlocal last
        x, weights = carry
        source = blocks.needed(number, 1)
        if source is None:
            x, last = _tied_source(x, last)
        return compute(kind, x, weights, source)

    carry = x, (weights if use.gathers == "blocks" else ())
    (y, weights), kept = blocks.loop.run(step, carry)
    following = None if last[0] is None else use.weights(*last, whole=True)
    return y, following, weights, kept


def _backward(
    blocks: _Blocks, pullback: Pullback, weights: Tree, kept: Any, dy: Tree, d_last: Tree | None
) -> tuple[Any, Tree, Tree | None]:
    """The gradients of the parameters, of the input of the first block, and of `last`."""

    @functools.partial(jax.jit, static_argnums=0)
    def compute(kind: int, dy: Tree, weights: Tree, source: Any, kept: Any) -> tuple[Carry, Tree]:
        dy, weights, following = blocks.begin(dy, weights, source)
        d_weights, dx = pullback(kind, weights, kept, dy)
        return (dx, following), blocks.gradients(d_weights)

    def step(carry: Carry, number: Any, kind: int) -> tuple[Carry, Tree]:
        return compute(kind, *carry, blocks.needed(number, -1), blocks.loop.take(kept, number))

    (dx, _), gradients, d_last = blocks.loop.run_reversed(step, (dy, weights), d_last)
    return as_float32(gradients), dx, as_float32(d_last)


def _typed_as(weights: Tree, parameters: Tree) -> Tree:
    """Parameters, typed as varying over the mesh axes over which weights made of them vary."""

    def typed(weight: jax.Array, parameter: jax.Array) -> jax.Array:
        return as_varying(parameter, jax.typeof(weight).manual_axis_type.varying)

    return jax.tree.map(typed, arrays_of(weights), parameters)


def _tied_source(x: Tree, source: Source) -> tuple[Tree, Source]:
    """Ties x and what weights are made of: each waits for the other."""
    parameters, gathered = source
    # Copies have no gradients, whose types would have to stay.
    axes = varying_axes(x)
    return tied(x, (parameters, jax.tree.map(lambda leaf: as_varying(leaf, axes), gathered)))
